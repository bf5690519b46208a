"""The pools that a phone's content is drawn from: people, words, products, songs, places."""

from __future__ import annotations

from random import Random

PEOPLE: dict[str, tuple[str, str]] = {
    # name: (family name, city)
    "Anna": ("Berger", "Vienna"), "Ben": ("Carter", "Bristol"), "Carla": ("Rossi", "Milan"),
    "David": ("Okafor", "Lagos"), "Elena": ("Petrova", "Sofia"), "Felix": ("Neumann", "Berlin"),
    "Grace": ("Kim", "Seoul"), "Hugo": ("Martin", "Lyon"), "Iris": ("Jansen", "Utrecht"), "Jonas": ("Lind", "Oslo"),
    "Kira": ("Novak", "Prague"), "Liam": ("Walsh", "Dublin"), "Mona": ("Haddad", "Beirut"), "Nils": ("Berg", "Malmo"),
    "Olga": ("Sidorova", "Riga"), "Paul": ("Moreau", "Brussels"),
}  # fmt: skip
CITIES = tuple(city for _, city in PEOPLE.values())
TOPICS = ("Budget", "Roadmap", "Holiday plan", "Team lunch", "Invoice", "Library card", "Concert", "New laptop")
EVENTS = ("Dentist", "Team meeting", "Piano lesson", "Book club", "Haircut", "Yoga", "Dinner", "Car service")
PLACES = ("Room 4", "Main street 12", "City library", "Cafe Luna", "Station", "Online", "Park gate", "Studio 9")
CHORES = ("Buy milk", "Water plants", "Pay rent", "Call the bank", "Clean windows", "Book flights", "Return books",
          "Charge camera", "Fix the bike", "Bake bread")  # fmt: skip
NOTE_TITLES = ("Packing list", "Gift ideas", "Recipe", "Door code", "Books to read", "Garden", "Meeting notes", "Trip")
NOTE_LINES = ("socks and a towel", "a red scarf", "two eggs and flour", "ask for a window seat",
              "check the train times", "bring the blue folder", "plant beans in May",
              "page 42 is worth it")  # fmt: skip
SONGS: dict[str, str] = {
    "Silver Rain": "The Harbours", "Night Train": "Mira Vale", "Paper Moon": "Low Tide", "Golden Hour": "Mira Vale",
    "Slow River": "The Harbours", "Open Window": "Ada Stone", "Northern Line": "Low Tide", "Firefly": "Ada Stone",
    "Second Spring": "Olive Grove", "Glass House": "Olive Grove",
}  # fmt: skip
PRODUCTS: dict[str, tuple[str, int]] = {
    # name: (category, usual price in euros)
    "Desk lamp": ("Home", 34), "Tea kettle": ("Home", 42), "Wool blanket": ("Home", 58), "Wall clock": ("Home", 27),
    "Headphones": ("Tech", 79), "Keyboard": ("Tech", 64), "Power bank": ("Tech", 29), "Webcam": ("Tech", 48),
    "Tent": ("Outdoor", 120), "Water bottle": ("Outdoor", 18), "Headlamp": ("Outdoor", 25), "Backpack": ("Outdoor", 88),
    "Cookbook": ("Books", 22), "Atlas": ("Books", 39), "Crime novel": ("Books", 14), "Sketchbook": ("Books", 12),
}  # fmt: skip
CATEGORIES = ("Home", "Tech", "Outdoor", "Books")
FILES: dict[str, tuple[str, ...]] = {
    "Documents": ("contract.pdf", "budget.xlsx", "thesis.docx", "visa.pdf"),
    "Downloads": ("ticket.pdf", "manual.pdf", "setup.zip", "menu.pdf"),
    "Music": ("demo.mp3", "podcast.mp3"),
    "Work": ("slides.pptx", "minutes.docx", "plan.xlsx"),
}
LINES = ("See you at the station", "The meeting moved to Friday", "Did you feed the cat?", "I left the keys at home",
         "Thanks for the photos", "Can you call me later?", "The train is late again", "Happy to help",
         "Lunch tomorrow?", "I found your umbrella")  # fmt: skip


def full_name(first: str) -> str:
    return f"{first} {PEOPLE[first][0]}"


def email(first: str) -> str:
    return f"{first}.{PEOPLE[first][0]}@mail.example".lower()


def phone_number(rng: Random) -> str:
    return f"0{rng.randint(150, 179)} {rng.randint(1000, 9999)}"


def time_of_day(rng: Random, first: int = 7, last: int = 20) -> str:
    return f"{rng.randint(first, last):02d}:{rng.choice((0, 15, 30, 45)):02d}"


MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip


def spoken(date: str) -> str:
    """2026-03-14 as "14 March"."""
    _, month, day = date.split("-")
    return f"{int(day)} {MONTHS[int(month) - 1]}"


def is_time(text: str) -> bool:
    """HH:MM within a day."""
    hours, colon, minutes = text.strip().partition(":")
    if not (colon and hours.isdecimal() and minutes.isdecimal() and len(minutes) == 2 and len(hours) in (1, 2)):
        return False
    return int(hours) < 24 and int(minutes) < 60


def as_time(text: str) -> str:
    """A time that `is_time` accepts, with two figures for the hour."""
    hours, _, minutes = text.strip().partition(":")
    return f"{int(hours):02d}:{minutes}"
