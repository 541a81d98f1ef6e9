"""Chronicles in several languages. The sentences were written for this project."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvkeep_bench.quality.items import Item, Question, spread, with_sentences

_QUESTIONS = 8
_VILLAGES = ("Almara", "Brunnfeld", "Cervol", "Dorvane", "Estrel", "Falkau", "Gravina", "Holmby",
             "Isarn", "Jorvel", "Kaltbach", "Lomara")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Language:
    """Sentences to fill with, and one fact with its question."""

    filler: Sequence[str]
    fact: str
    question: str


_LANGUAGES: Mapping[str, _Language] = {
    "German": _Language(
        (
            "Im Herbst kamen die Händler mit ihren Wagen über den Pass.",
            "Der Müller klagte über das niedrige Wasser im Bach.",
            "Am Abend saßen die Alten vor der Kirche und erzählten von früher.",
            "Die Brücke wurde nach dem Hochwasser neu gebaut.",
            "Im Winter lag der Schnee so hoch, dass man die Zäune nicht mehr sah.",
            "Die Kinder sammelten Kastanien und verkauften sie auf dem Markt.",
            "Ein Fremder fragte nach dem Weg und blieb drei Jahre.",
            "Der Schmied arbeitete bis spät in die Nacht an den neuen Toren.",
        ),
        "Der Brunnen von {village} ist {value} Ellen tief.",
        "Wie viele Ellen tief ist der Brunnen von {village}?",
    ),
    "French": _Language(
        (
            "Au printemps, les bergers montaient vers les hauts pâturages.",
            "Le boulanger ouvrait sa porte bien avant l'aube.",
            "On avait planté des tilleuls tout autour de la place.",
            "La rivière avait débordé deux fois cette année-là.",
            "Les marchands de laine discutaient longuement sous les arcades.",
            "Une vieille horloge sonnait toujours un peu en retard.",
            "Le facteur connaissait chaque chien par son nom.",
            "Le soir, on entendait le violon de l'aubergiste.",
        ),
        "Le puits de {village} est profond de {value} coudées.",
        "De combien de coudées le puits de {village} est-il profond ?",
    ),
    "Spanish": _Language(
        (
            "Los pescadores volvían al puerto cuando caía el sol.",
            "La panadera guardaba siempre un bollo para los niños.",
            "En agosto nadie trabajaba durante las horas de más calor.",
            "El camino del molino estaba cubierto de higueras.",
            "Los ancianos jugaban a las cartas bajo el porche.",
            "Una tormenta derribó el campanario y tardaron un año en levantarlo.",
            "El maestro enseñaba a leer con periódicos viejos.",
            "Cada domingo llegaba un músico distinto a la plaza.",
        ),
        "El pozo de {village} tiene {value} varas de profundidad.",
        "¿Cuántas varas de profundidad tiene el pozo de {village}?",
    ),
    "Italian": _Language(
        (
            "La vendemmia cominciava sempre con una festa nel cortile.",
            "Il calzolaio cantava mentre cuciva le suole.",
            "Dalla torre si vedeva il mare nelle giornate limpide.",
            "Le barche venivano dipinte ogni anno prima di Pasqua.",
            "Il medico passava di casa in casa con la sua mula.",
            "Nessuno ricordava chi avesse costruito il vecchio ponte.",
            "Le lucciole riempivano i campi nelle notti di giugno.",
            "La biblioteca era aperta soltanto il giovedì.",
        ),
        "Il pozzo di {village} è profondo {value} braccia.",
        "Quante braccia è profondo il pozzo di {village}?",
    ),
}


def languages(number: int, words: int) -> Item:
    """One language a document, in turn; depths of wells among a village's small events."""
    name = list(_LANGUAGES)[number % len(_LANGUAGES)]
    language = _LANGUAGES[name]
    draw = random.Random(f"languages {number}")
    paragraphs = []
    given = 0
    while given < words:
        # A year before each paragraph keeps the same sentence from standing in the same company.
        paragraph = f"{draw.randrange(1300, 1900)}. " + " ".join(draw.sample(language.filler, 3))
        given += len(paragraph.split())
        paragraphs.append(paragraph)
    villages = draw.sample(_VILLAGES, _QUESTIONS)
    depths = [str(draw.randrange(21, 999)) for _ in villages]
    facts = [
        language.fact.format(village=village, value=value)
        for village, value in zip(villages, depths, strict=True)
    ]
    questions = tuple(
        Question(language.question.format(village=village), (value,))
        for village, value in zip(villages, depths, strict=True)
    )
    document = with_sentences(paragraphs, facts, spread(_QUESTIONS, len(paragraphs)))
    return Item("languages", f"languages-{number}-{name}", document, questions)
