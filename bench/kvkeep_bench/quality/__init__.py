"""Documents with questions of known answers, and what becomes of the answers under compression."""
