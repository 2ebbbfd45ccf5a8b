"""Store database. Every operation returns a new database.

Operations check that objects exist and that stock suffices. Whether an operation is allowed is
stated by the policy and left to the agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["pending", "shipped", "delivered", "cancelled"]


class StoreError(Exception):
    """An operation that the database cannot perform; the model reads the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    sku: str
    name: str
    colour: str
    cents: int
    stock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    id: str
    name: str
    email: str
    credit_cents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLine:
    sku: str
    quantity: int
    cents: int  # unit price at the time of purchase


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerOrder:
    id: str
    customer: str
    lines: tuple[OrderLine, ...]
    status: Status
    address: str
    days: int = 0  # since delivery

    @property
    def cents(self) -> int:
        return sum(line.quantity * line.cents for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDatabase:
    products: Mapping[str, Product]
    customers: Mapping[str, Customer]
    orders: Mapping[str, CustomerOrder]

    def order(self, order_id: str) -> CustomerOrder:
        if order_id not in self.orders:
            raise StoreError(f"there is no order {order_id!r}")
        return self.orders[order_id]

    def product(self, sku: str) -> Product:
        if sku not in self.products:
            raise StoreError(f"there is no product {sku!r}")
        return self.products[sku]

    def customer_by_email(self, email: str) -> Customer:
        for customer in self.customers.values():
            if customer.email == email.strip().lower():
                return customer
        raise StoreError(f"no customer has the email {email!r}")

    def cancel(self, order_id: str) -> "StoreDatabase":
        """Cancel an order, credit its price and restock its goods."""
        order = self.order(order_id)
        if order.status == "cancelled":
            raise StoreError(f"order {order_id} is cancelled already")
        store = self._credited(order.customer, order.cents)
        for line in order.lines:
            store = store._stocked(line.sku, line.quantity)
        return store._with(replace(order, status="cancelled"))

    def return_goods(self, order_id: str, sku: str, quantity: int) -> "StoreDatabase":
        """Restock some goods of an order and credit their price."""
        order = self.order(order_id)
        line = _line(order, sku)
        if not 1 <= quantity <= line.quantity:
            raise StoreError(f"order {order_id} has {line.quantity} of {sku}, not {quantity}")
        rest = replace(line, quantity=line.quantity - quantity)
        lines = tuple(rest if old == line else old for old in order.lines)
        store = self._credited(order.customer, quantity * line.cents)._stocked(sku, quantity)
        return store._with(replace(order, lines=tuple(line for line in lines if line.quantity)))

    def exchange(self, order_id: str, sku: str, new_sku: str) -> "StoreDatabase":
        """Exchange all goods of one kind for as many of another. The price difference is credited
        or charged to the credit, which may become negative."""
        order = self.order(order_id)
        line, new = _line(order, sku), self.product(new_sku)
        if new.stock < line.quantity:
            raise StoreError(f"only {new.stock} of {new_sku} are in stock, not {line.quantity}")
        swapped = replace(line, sku=new_sku, cents=new.cents)
        lines = tuple(swapped if old == line else old for old in order.lines)
        store = self._credited(order.customer, line.quantity * (line.cents - new.cents))
        store = store._stocked(sku, line.quantity)._stocked(new_sku, -line.quantity)
        return store._with(replace(order, lines=lines))

    def change_address(self, order_id: str, address: str) -> "StoreDatabase":
        return self._with(replace(self.order(order_id), address=" ".join(address.split())))

    def _with(self, order: CustomerOrder) -> "StoreDatabase":
        return replace(self, orders={**self.orders, order.id: order})

    def _credited(self, customer_id: str, cents: int) -> "StoreDatabase":
        customer = self.customers[customer_id]
        updated = replace(customer, credit_cents=customer.credit_cents + cents)
        return replace(self, customers={**self.customers, customer_id: updated})

    def _stocked(self, sku: str, quantity: int) -> "StoreDatabase":
        product = self.product(sku)
        updated = replace(product, stock=product.stock + quantity)
        return replace(self, products={**self.products, sku: updated})


def _line(order: CustomerOrder, sku: str) -> OrderLine:
    for line in order.lines:
        if line.sku == sku:
            return line
    raise StoreError(f"order {order.id} has no {sku!r}")


def format_money(cents: int) -> str:
    """Format an amount in dollars.

    >>> format_money(120550), format_money(-5)
    ('$1205.50', '-$0.05')
    """
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100}.{abs(cents) % 100:02d}"
