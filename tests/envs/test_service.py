import asyncio
import json
from dataclasses import replace

import pytest

from paddock.envs import make, run_rollout
from paddock.envs.service.scenarios import CustomerIntent
from paddock.envs.service.store import (
    Customer,
    CustomerOrder,
    OrderLine,
    Product,
    StoreDatabase,
    StoreError,
    format_money,
)
from paddock.envs.service.store_api import StoreAPI
from paddock.envs.service.taskset import SimulatedUser, _solve
from paddock.envs.tools import execute_tool_calls
from paddock.records import Message, ToolCall
from tests.envs.soundness import (
    check_sound,
    check_tasks,
    constant_policy,
    outcomes,
    pass_rate,
    rewards,
)


def always_compliant(taskset):
    """A policy that does everything requested, allowed or not."""

    def policy(task):
        scenario = taskset.scenario(task)
        granted = [
            replace(intent, action=intent.forbidden_action, forbidden_action=None)
            if intent.forbidden_action
            else intent
            for intent in scenario.intents
        ]
        return scripted_agent(scenario, granted)

    return policy


def forgetful(taskset):
    """A policy that handles every intent but the last."""

    def policy(task):
        scenario = taskset.scenario(task)
        return scripted_agent(
            scenario, [*scenario.intents[:-1], CustomerIntent(request="", must_say="done")]
        )

    return policy


def without_messages(taskset):
    """A policy that does everything and tells the customer nothing."""

    def policy(task):
        scenario = taskset.scenario(task)
        mute = [replace(intent, must_say="") for intent in scenario.intents]
        return scripted_agent(scenario, mute)

    return policy


def scripted_agent(scenario, intents):
    script = [] if scenario.gives_email else [Message(role="assistant", content="Your email?")]
    for intent in intents:
        script += _solve(intent)

    async def reply_next(messages, tools):
        num_replies = sum(message.role == "assistant" for message in messages)
        return (
            script[num_replies]
            if num_replies < len(script)
            else Message(role="assistant", content="Well.")
        )

    return reply_next


@pytest.mark.parametrize("level", [1, 2, 3, 5])
def test_scenarios_are_sound(level):
    taskset = make("service", {"level": level})
    check_sound(taskset, 60, [lambda task: constant_policy("It is done.")])
    tasks = [taskset.task(index) for index in range(60)]
    open_ended = [task for task in tasks if not taskset.scenario(task).intents[-1].forbidden_action]
    assert len(open_ended) > 30
    assert max(rewards(taskset, open_ended, forgetful(taskset))) == 0


def test_tasks_are_reproducible_distinct_and_split():
    check_tasks(lambda: make("service", {"level": 3}), 200)


def test_level_changes_the_pass_rate_of_an_always_compliant_policy():
    rates = []
    for level in (1, 3, 5):
        taskset = make("service", {"level": level})
        rates.append(
            pass_rate(taskset, [taskset.task(n) for n in range(120)], always_compliant(taskset))
        )
    assert rates[0] == 1
    assert 0.9 > rates[1] > rates[2] + 0.1


def test_required_information_counts():
    taskset = make("service", {"level": 2})
    tasks = [
        task
        for task in map(taskset.task, range(60))
        if any(intent.must_say for intent in taskset.scenario(task).intents)
    ]
    for outcome in outcomes(taskset, tasks, without_messages(taskset)):
        assert outcome.reward == 0
        assert outcome.parts["told"] < 1
        assert outcome.parts["database"] == outcome.parts["ended"] == 1


def test_an_unfinished_dialogue_has_reward_zero():
    taskset = make("service", {"level": 1, "max_turns": 2})
    (outcome,) = outcomes(
        taskset, [taskset.task(0)], lambda task: scripted_agent(taskset.scenario(task), [])
    )
    assert outcome.reward == 0


def test_a_customer_gives_the_email_when_asked_and_insists_once():
    taskset = make("service", {"level": 3})
    for index in range(40):
        task = taskset.task(index)
        scenario = taskset.scenario(task)
        assert scenario.customer.email not in task.messages[1].content
        rollout = asyncio.run(run_rollout(taskset.make_env(task), taskset.solver(task)))
        user_messages = [m.content for m in rollout.messages if m.role == "user"][1:]
        assert user_messages[0] == f"It is {scenario.customer.email}."
        pushes = [intent.push for intent in scenario.intents if intent.push]
        assert [text for text in user_messages if text in pushes] == pushes


def test_a_customer_confirms_a_question_and_continues_after_an_offer_of_help():
    taskset = make("service", {"level": 1})
    scenario = taskset.scenario(taskset.task(0))
    user = SimulatedUser(scenario)
    assert [user.respond("Shall I do that?") for _ in range(3)] == ["Yes, please."] * 2 + [None]
    user = SimulatedUser(scenario)
    assert user.respond("Done. Anything else?") is None


def test_the_solver_gets_its_facts_from_working_tools():
    taskset = make("service", {"level": 4})
    for index in range(20):
        task = taskset.task(index)
        rollout = asyncio.run(run_rollout(taskset.make_env(task), taskset.solver(task)))
        results = [m.content for m in rollout.messages if m.role == "tool"]
        assert not [text for text in results if text.startswith("error")]


SHOP = StoreDatabase(
    products={
        "A": Product(sku="A", name="lamp", colour="red", cents=500, stock=1),
        "B": Product(sku="B", name="lamp", colour="blue", cents=700, stock=3),
    },
    customers={"C1": Customer(id="C1", name="Ada", email="ada@example.org")},
    orders={
        "W1": CustomerOrder(
            id="W1",
            customer="C1",
            lines=(OrderLine(sku="A", quantity=2, cents=500),),
            status="pending",
            address="x",
        )
    },
)


def total_value(shop):
    """Total of money and goods: no action creates or loses any."""
    goods = sum(product.stock for product in shop.products.values())
    sold = [order for order in shop.orders.values() if order.status != "cancelled"]
    goods += sum(line.quantity for order in sold for line in order.lines)
    cents = sum(customer.credit_cents for customer in shop.customers.values())
    return goods, cents + sum(order.cents for order in sold)


@pytest.mark.parametrize(
    ("act", "credit", "stock"),
    [
        (lambda shop: shop.cancel("W1"), 1000, 3),
        (lambda shop: shop.return_goods("W1", "A", 1), 500, 2),
        (lambda shop: shop.return_goods("W1", "A", 2), 1000, 3),
        (lambda shop: shop.exchange("W1", "A", "B"), -400, 3),
        (lambda shop: shop.change_address("W1", "y"), 0, 1),
    ],
)
def test_an_action_changes_a_copy_and_loses_nothing(act, credit, stock):
    after = act(SHOP)
    assert after.customers["C1"].credit_cents == credit
    assert after.products["A"].stock == stock
    assert total_value(after) == total_value(SHOP)
    assert SHOP.orders["W1"].status == "pending"


@pytest.mark.parametrize(
    ("act", "num_replies"),
    [
        (lambda shop: shop.cancel("W2"), "there is no order 'W2'"),
        (lambda shop: shop.cancel("W1").cancel("W1"), "cancelled already"),
        (lambda shop: shop.return_goods("W1", "A", 3), "has 2 of A, not 3"),
        (lambda shop: shop.return_goods("W1", "B", 1), "has no 'B'"),
        (lambda shop: shop.exchange("W1", "A", "Z"), "there is no product 'Z'"),
        (lambda shop: shop.exchange("W1", "A", "A"), "only 1 of A are in stock, not 2"),
    ],
)
def test_an_invalid_action_is_rejected(act, num_replies):
    with pytest.raises(StoreError, match=num_replies):
        act(SHOP)


def test_tools_show_the_database_and_report_errors():
    desk = StoreAPI(SHOP)

    def call(name, **arguments):
        reply = Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="1", name=name, arguments=arguments),),
        )
        return asyncio.run(execute_tool_calls(desk.tools, reply))[0].content

    assert json.loads(call("find_customer", email=" Ada@Example.org "))["customer_id"] == "C1"
    assert json.loads(call("list_orders", customer_id="C1"))[0]["total"] == format_money(1000)
    assert [p["sku"] for p in json.loads(call("find_products", product="red lamps"))] == ["A", "B"]
    assert call("cancel_order", order_id="W9") == "error: there is no order 'W9'"
    assert call("return_goods", order_id="W1", sku="A", quantity=0).startswith("error: return_go")
    assert json.loads(call("cancel_order", order_id="W1"))["status"] == "cancelled"
    assert desk.store == SHOP.cancel("W1")


def test_rewards_of_the_solver_come_with_their_parts():
    taskset = make("service", {})
    assert rewards(taskset, [taskset.task(0)], taskset.solver) == [1.0]
    (outcome,) = outcomes(taskset, [taskset.task(0)], taskset.solver)
    assert outcome.parts == {"database": 1.0, "told": 1.0, "ended": 1.0}
