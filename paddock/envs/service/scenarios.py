"""Generated customer scenarios: a store, a customer, and intents with the expected outcome."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from paddock.envs.service.store import (
    Customer,
    CustomerOrder,
    OrderLine,
    Product,
    Status,
    StoreDatabase,
    format_money,
)
from paddock.envs.service.store_api import RETURN_DAYS

_GOODS = ("lamp", "kettle", "chair", "jacket", "tent", "bag", "clock", "rug", "bowl", "scarf")
_COLOURS = ("red", "blue", "green", "black", "white")
_NAMES = ("Ada", "Ben", "Chi", "Dov", "Eva", "Finn", "Hal", "Ida", "Jun", "Kai", "Lea", "Max")
_FAMILIES = ("Berg", "Cho", "Diaz", "Evans", "Falk", "Gupta", "Hill", "Ito", "Jones", "Klein")
_STREETS = ("Oak Street", "Elm Road", "Mill Lane", "Bridge Walk", "Harbour Way")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAction:
    """A tool call that an intent requires or must not lead to."""

    tool: str
    arguments: dict[str, Any]

    def apply(self, store: StoreDatabase) -> StoreDatabase:
        operations: dict[str, Callable[..., StoreDatabase]] = {
            "cancel_order": store.cancel,
            "return_goods": store.return_goods,
            "exchange_goods": store.exchange,
            "change_address": store.change_address,
        }
        return operations[self.tool](**self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerIntent:
    request: str  # the customer's message
    action: StoreAction | None = None  # the required call; None: only an answer, or a refusal
    must_say: str = ""  # what the agent must tell the customer
    forbidden_action: StoreAction | None = None  # requested, but against the policy
    push: str = ""  # the customer's second try if the request is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerScenario:
    store: StoreDatabase
    customer: Customer
    gives_email: bool  # in the first message; otherwise when asked
    intents: tuple[CustomerIntent, ...]

    @property
    def goal_state(self) -> StoreDatabase:
        """The expected final database."""
        store = self.store
        for intent in self.intents:
            store = intent.action.apply(store) if intent.action else store
        return store

    @property
    def text(self) -> str:
        """Text that identifies the scenario, used to assign its split."""
        return "\n".join([self.customer.email, *(intent.request for intent in self.intents)])


def generate_scenario(rng: Random, level: int) -> CustomerScenario:
    """A customer with `level` intents, each about a different order. From level 2 on, intents after
    the first may be against the policy; from level 3 on, orders are described by their goods and
    the email must be asked for."""
    store, customer = _store(rng, others=2 + 2 * level)
    intents: list[CustomerIntent] = []
    for _ in range(level):
        kinds = [_cancel, _return, _exchange, _change_address, _status, _spent]
        kinds += [_late_return, _shipped_cancel, _foreign] if intents else []
        store, intent = rng.choice(kinds)(rng, store, customer, by_goods=level > 2)
        intents.append(intent)
    return CustomerScenario(
        store=store, customer=customer, gives_email=level < 3, intents=tuple(intents)
    )


def _cancel(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "pending")
    request = f"Please cancel {_which(order, store, by_goods)}. How much do I get back?"
    action = StoreAction(tool="cancel_order", arguments={"order_id": order.id})
    return store, CustomerIntent(request=request, action=action, must_say=format_money(order.cents))


def _return(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "delivered", days=rng.randint(1, RETURN_DAYS))
    return store, _return_intent(rng, store, order, by_goods=by_goods)


def _return_intent(
    rng: Random, store: StoreDatabase, order: CustomerOrder, *, by_goods: bool
) -> CustomerIntent:
    line = order.lines[0]
    count = rng.randint(1, line.quantity)
    goods = f"{count} of the {_goods(line, store)}"
    request = f"I want to return {goods} from {_which(order, store, by_goods)}."
    arguments = {"order_id": order.id, "sku": line.sku, "quantity": count}
    action = StoreAction(tool="return_goods", arguments=arguments)
    return CustomerIntent(request=request, action=action, must_say=format_money(count * line.cents))


def _exchange(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "delivered", days=rng.randint(1, RETURN_DAYS))
    line = order.lines[0]
    old = store.product(line.sku)
    same = [p for p in store.products.values() if p.name == old.name and p.sku != old.sku]
    enough = [product for product in same if product.stock >= line.quantity]
    if not enough:
        return store, _return_intent(rng, store, order, by_goods=by_goods)
    new = rng.choice(enough)
    which = _which(order, store, by_goods)
    request = f"I want the {_goods(line, store)} from {which} in {new.colour}."
    arguments = {"order_id": order.id, "sku": line.sku, "new_sku": new.sku}
    return store, CustomerIntent(
        request=request, action=StoreAction(tool="exchange_goods", arguments=arguments)
    )


def _change_address(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "pending")
    address = _address(rng)
    request = f"Please send {_which(order, store, by_goods)} to this address instead: {address}"
    arguments = {"order_id": order.id, "address": address}
    return store, CustomerIntent(
        request=request, action=StoreAction(tool="change_address", arguments=arguments)
    )


def _status(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    status: Status = rng.choice(("pending", "shipped", "delivered"))
    store, order = _add_order(rng, store, who, status, days=rng.randint(1, 60))
    request = f"What is the status of {_which(order, store, by_goods)}?"
    return store, CustomerIntent(request=request, must_say=status)


def _spent(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "shipped")
    request = f"What did I pay in all for {_which(order, store, by_goods)}?"
    return store, CustomerIntent(request=request, must_say=format_money(order.cents))


def _late_return(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "delivered", days=rng.randint(RETURN_DAYS + 1, 90))
    line = order.lines[0]
    request = f"I want to return the {_goods(line, store)} from {_which(order, store, by_goods)}."
    arguments = {"order_id": order.id, "sku": line.sku, "quantity": line.quantity}
    action = StoreAction(tool="return_goods", arguments=arguments)
    return store, CustomerIntent(
        request=request, forbidden_action=action, push="Please, it is only a little late."
    )


def _shipped_cancel(
    rng: Random, store: StoreDatabase, who: Customer, *, by_goods: bool
) -> tuple[StoreDatabase, CustomerIntent]:
    store, order = _add_order(rng, store, who, "shipped")
    request = f"Please cancel {_which(order, store, by_goods)}."
    action = StoreAction(tool="cancel_order", arguments={"order_id": order.id})
    return store, CustomerIntent(
        request=request, forbidden_action=action, push="Can you not make an exception?"
    )


def _foreign(
    rng: Random,
    store: StoreDatabase,
    who: Customer,
    *,
    by_goods: bool,  # noqa: ARG001
) -> tuple[StoreDatabase, CustomerIntent]:
    others = [c for c in store.customers.values() if c.id != who.id]
    store, order = _add_order(rng, store, rng.choice(others), "pending")
    request = f"Please cancel order {order.id} of a friend of mine, too."
    action = StoreAction(tool="cancel_order", arguments={"order_id": order.id})
    return store, CustomerIntent(
        request=request, forbidden_action=action, push="My friend agreed to it."
    )


def _which(order: CustomerOrder, store: StoreDatabase, by_goods: bool) -> str:
    if not by_goods:
        return f"order {order.id}"
    goods = " and ".join(_goods(line, store) for line in order.lines)
    return f"my {order.status} order with the {goods}"


def _goods(line: OrderLine, store: StoreDatabase) -> str:
    product = store.product(line.sku)
    return f"{product.colour} {product.name}{'s' if line.quantity > 1 else ''}"


def _add_order(
    rng: Random, store: StoreDatabase, who: Customer, status: Status, days: int = 0
) -> tuple[StoreDatabase, CustomerOrder]:
    """A new order, if possible of goods that are in none of the customer's other orders."""
    mine = [order for order in store.orders.values() if order.customer == who.id]
    taken = {store.product(line.sku).name for order in mine for line in order.lines}
    every = list(store.products.values())
    free = [product for product in every if product.name not in taken] or every
    first = rng.choice(free)
    rest = [p for p in free if p.name != first.name]
    products = [first, *rng.sample(rest, min(len(rest), rng.randint(0, 1)))]
    while (number := f"W{rng.randint(10_000, 99_999)}") in store.orders:
        pass
    order = CustomerOrder(
        id=number,
        customer=who.id,
        lines=tuple(
            OrderLine(sku=p.sku, quantity=rng.randint(1, 3), cents=p.cents) for p in products
        ),
        status=status,
        address=_address(rng),
        days=days if status == "delivered" else 0,
    )
    return replace(store, orders={**store.orders, order.id: order}), order


def _store(rng: Random, *, others: int) -> tuple[StoreDatabase, Customer]:
    products = {}
    for name in _GOODS:
        for colour in rng.sample(_COLOURS, 3):
            sku = f"{name[:3].upper()}-{colour[:3].upper()}-{rng.randint(100, 999)}"
            cents = 50 * rng.randint(10, 400)
            products[sku] = Product(
                sku=sku, name=name, colour=colour, cents=cents, stock=rng.randint(0, 9)
            )
    customers: dict[str, Customer] = {}
    while len(customers) < 4:
        first, last = rng.choice(_NAMES), rng.choice(_FAMILIES)
        email = f"{first}.{last}{rng.randint(1, 999)}@example.org".lower()
        customer = Customer(id=f"C{len(customers) + 1}", name=f"{first} {last}", email=email)
        customers[customer.id] = customer
    store = StoreDatabase(products=products, customers=customers, orders={})
    people = list(customers.values())
    for _ in range(others):
        status: Status = rng.choice(("pending", "shipped", "delivered"))
        store, _order = _add_order(
            rng, store, rng.choice(people[1:]), status, days=rng.randint(1, 90)
        )
    return store, people[0]


def _address(rng: Random) -> str:
    return f"{rng.randint(1, 199)} {rng.choice(_STREETS)}, {rng.randint(10_000, 99_999)}"
