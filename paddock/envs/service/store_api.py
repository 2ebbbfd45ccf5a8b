"""Tools and policy of the customer-service agent; the tools read and change the database."""

import json
from collections.abc import Callable
from typing import Any

from paddock.envs.service.store import (
    CustomerOrder,
    OrderLine,
    Product,
    StoreDatabase,
    StoreError,
    format_money,
)
from paddock.envs.tools import Tool, ToolError, ToolFunc
from paddock.records import ToolSpec

POLICY = """\
You work at the help desk of a shop. You help one customer at a time, by tools and by answers.

1. Find out first who writes: ask for the email, then look the customer up. Act only on orders of
   that customer, and say nothing of other customers.
2. An order that is pending may be cancelled, and its address may be changed. One that is shipped,
   delivered or cancelled may not.
3. Goods of a delivered order may be returned or exchanged within 30 days of delivery. Later, or
   before delivery, they may not.
4. An exchange is for the same product in another colour only. It must be in stock.
5. What is paid back goes to the customer's credit. Say the amount.
6. What the rules forbid you refuse, however often you are asked.
7. Do what is asked and nothing else. Numbers you give must come from the database."""
RETURN_DAYS = 30


def _spec(name: str, about: str, **arguments: dict[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": arguments, "required": [*arguments]}
    return ToolSpec(name=name, description=about, parameters=schema)


_TEXT = {"type": "string"}
_ORDER = {"type": "string", "description": "the order's number"}
_SKU = {"type": "string", "description": "the product's sku"}
_ADDRESS = {"type": "string", "description": "the new address"}
_COUNT = {"type": "integer", "minimum": 1}
SPECS = (
    _spec("find_customer", "Look a customer up.", email=_TEXT),
    _spec("list_orders", "All orders of a customer.", customer_id=_TEXT),
    _spec("get_order", "One order.", order_id=_ORDER),
    _spec("find_products", "Products by name, such as lamp.", product=_TEXT),
    _spec("cancel_order", "Cancel an order.", order_id=_ORDER),
    _spec(
        "return_goods", "Take goods of an order back.", order_id=_ORDER, sku=_SKU, quantity=_COUNT
    ),
    _spec(
        "exchange_goods",
        "Exchange all goods of one kind in an order for another product.",
        order_id=_ORDER,
        sku=_SKU,
        new_sku=_SKU,
    ),
    _spec("change_address", "Change where an order goes.", order_id=_ORDER, address=_ADDRESS),
)


class StoreAPI:
    """A database with the tools that operate on it."""

    def __init__(self, store: StoreDatabase) -> None:
        self.store = store
        functions: tuple[ToolFunc, ...] = (
            *(self._customer, self._orders, self._order, self._products),
            *(self._cancel, self._return, self._exchange, self._change_address),
        )
        self.tools = tuple(Tool(spec, run) for spec, run in zip(SPECS, functions, strict=True))

    async def _customer(self, email: str) -> str:
        found = _as_tool_errors(lambda: self.store.customer_by_email(email))
        credit = format_money(found.credit_cents)
        return _json({"customer_id": found.id, "name": found.name, "credit": credit})

    async def _orders(self, customer_id: str) -> str:
        if customer_id not in self.store.customers:
            raise ToolError(f"there is no customer {customer_id!r}")
        found = [order for order in self.store.orders.values() if order.customer == customer_id]
        return _json([self._shown(order) for order in found])

    async def _order(self, order_id: str) -> str:
        return _json(self._shown(_as_tool_errors(lambda: self.store.order(order_id))))

    async def _products(self, product: str) -> str:
        # Plurals and whole descriptions match their product, too.
        words = product.lower()
        found = [p for p in self.store.products.values() if p.name in words or words in p.name]
        return _json([_product(each) for each in found])

    async def _cancel(self, order_id: str) -> str:
        return self._update(lambda: self.store.cancel(order_id), order_id)

    async def _return(self, order_id: str, sku: str, quantity: int) -> str:
        return self._update(lambda: self.store.return_goods(order_id, sku, quantity), order_id)

    async def _exchange(self, order_id: str, sku: str, new_sku: str) -> str:
        return self._update(lambda: self.store.exchange(order_id, sku, new_sku), order_id)

    async def _change_address(self, order_id: str, address: str) -> str:
        return self._update(lambda: self.store.change_address(order_id, address), order_id)

    def _update(self, act: Callable[[], StoreDatabase], order_id: str) -> str:
        self.store = _as_tool_errors(act)
        return _json(self._shown(self.store.order(order_id)))

    def _shown(self, order: CustomerOrder) -> dict[str, Any]:
        return {
            "order_id": order.id,
            "customer_id": order.customer,
            "status": order.status,
            **({"delivered_days_ago": order.days} if order.status == "delivered" else {}),
            "address": order.address,
            "goods": [self._line(line) for line in order.lines],
            "total": format_money(order.cents),
        }

    def _line(self, line: OrderLine) -> dict[str, Any]:
        product = self.store.product(line.sku)
        return {
            "sku": line.sku,
            "name": product.name,
            "colour": product.colour,
            "quantity": line.quantity,
            "paid_each": format_money(line.cents),
        }


def _product(product: Product) -> dict[str, Any]:
    return {
        "sku": product.sku,
        "name": product.name,
        "colour": product.colour,
        "price": format_money(product.cents),
        "in_stock": product.stock,
    }


def _as_tool_errors(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except StoreError as error:
        raise ToolError(str(error)) from None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
