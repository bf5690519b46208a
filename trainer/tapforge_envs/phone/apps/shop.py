"""Shop: categories and search, a page for each product, cart, checkout and orders."""

from __future__ import annotations

from random import Random

from tapforge_envs.phone.shell import app
from tapforge_envs.phone.view import Do, Item, State, View, frame_of, go, toast

from .world import CATEGORIES, PRODUCTS

NAME, GLYPH, COLOR = "shop", "shop", (226, 110, 32)
_GLYPHS = {"Home": "home", "Tech": "calculator", "Outdoor": "sun", "Books": "notes"}


def content(rng: Random) -> State:
    products = {
        name: {
            "price": round(usual * rng.uniform(0.7, 1.3)),
            "stock": rng.randint(3, 20),
            "rating": rng.randint(31, 50),
        }
        for name, (_, usual) in PRODUCTS.items()
    }
    return {"products": products, "cart": {}, "orders": [], "wishes": []}


def view(state: State) -> View:
    own = state["apps"][NAME]
    page, _, rest = state["nav"]["page"].partition("/")
    if page == "product":
        return _product(state, own, rest)
    if page == "cart":
        return _cart(state, own)
    if page == "orders":
        v = View(state, "Orders", COLOR)
        for i, order in enumerate(own["orders"]):
            words = ", ".join(f"{count} x {name}" for name, count in order["items"].items())
            v.row(f"order:{i}", f"Order {i + 1}", words, trail=f"{order['total']} euros")
        if not own["orders"]:
            v.prose("empty", "No orders yet.")
        return v
    frame = frame_of(state)
    shown = frame.get("category", "All")
    v = View(state, "Shop", COLOR)
    v.input("search", "Search products")
    v.line(
        "categories",
        [
            Item(f"category:{c}", "chip", c, on=c == shown, color=COLOR, do=_show(frame, c))
            for c in ("All", *CATEGORIES)
        ],
        height=0.062,
    )
    wanted = v.value("search").strip().casefold()
    for name, (category, _) in PRODUCTS.items():
        if shown in ("All", category) and wanted in name.casefold():
            p = own["products"][name]
            v.row(
                f"product:{name}",
                name,
                f"{p['rating'] / 10:.1f} stars" if p["stock"] else "Out of stock",
                glyph=_GLYPHS[category],
                trail=f"{p['price']} euros",
                do=v.to(f"product/{name}"),
            )
    v.tool("orders", "menu", v.to("orders"))
    v.tool("cart", "shop", v.to("cart"))
    return v


def _show(frame: State, category: str) -> Do:
    return lambda: frame.update(category=category, scroll=None)


def _product(state: State, own: State, name: str) -> View:
    p = own["products"][name]
    category = PRODUCTS[name][0]
    v = View(state, name, COLOR)

    def add() -> None:
        if own["cart"].get(name, 0) >= p["stock"]:
            toast(state, "Not enough in stock")
            return
        own["cart"][name] = own["cart"].get(name, 0) + 1
        toast(state, f"{own['cart'][name]} in the cart")

    def wish() -> None:
        own["wishes"] = [w for w in own["wishes"] if w != name] if name in own["wishes"] else [*own["wishes"], name]

    v.items.append(Item("picture", "picture", category, glyph=_GLYPHS[category], color=(120, 104, 92), height=0.25))
    v.row("price", f"{p['price']} euros", "Price", glyph="shop")
    v.row("rating", f"{p['rating'] / 10:.1f} of 5 stars", "Rating", glyph="star")
    v.row("stock", f"{p['stock']} in stock" if p["stock"] else "Out of stock", "Availability", glyph="info")
    if p["stock"]:
        v.button("add", "Add to cart", add)
    v.tool("cart", "shop", v.to("cart"))
    v.tool("wish", "heart" if name in own["wishes"] else "heart_line", wish)
    return v


def _cart(state: State, own: State) -> View:
    v = View(state, "Cart", COLOR)
    total = sum(own["products"][name]["price"] * count for name, count in own["cart"].items())

    def change(name: str, by: int) -> Do:
        def do() -> None:
            count = own["cart"][name] + by
            if count > own["products"][name]["stock"]:
                toast(state, "Not enough in stock")
            elif count > 0:
                own["cart"][name] = count
            else:
                del own["cart"][name]

        return do

    def order() -> None:
        own["orders"].append({"items": dict(own["cart"]), "total": total})
        for name, count in own["cart"].items():
            own["products"][name]["stock"] -= count
        own["cart"] = {}
        go(state, "orders")
        toast(state, "Thank you for your order")

    for name, count in own["cart"].items():
        v.line(
            f"cart:{name}",
            (
                Item(
                    f"in-cart:{name}",
                    text=name,
                    detail=f"{own['products'][name]['price']} euros",
                    trail=str(count),
                    color=COLOR,
                ),
                Item(f"less:{name}", "chip", "-", color=COLOR, do=change(name, -1)),
                Item(f"more:{name}", "chip", "+", color=COLOR, do=change(name, 1)),
            ),
            height=0.084,
            shares=(0.64, 0.18, 0.18),
        )
    if own["cart"]:
        v.row("total", "Total", trail=f"{total} euros")
        v.button("order", "Order now", v.ask("order"))
        v.confirm("order", "Place the order?", f"{total} euros will be charged.", "Order", order)
    else:
        v.prose("empty", "Your cart is empty.")
    return v


APP = app(NAME, GLYPH, COLOR, content, view)
