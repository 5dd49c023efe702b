"""What an application may not write: type checkers report each line that says so, and no other."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from asynctask import AsyncTask, current_job

app = AsyncTask(environ={}, database_url="sqlite:///typed.db")


class Product(BaseModel):
    sku: str


class Order(BaseModel):
    number: int


@app.worker
def bare(item: Product) -> dict[str, str]:
    return {"sku": item.sku}


@app.worker(retry=3)
def number(item: int) -> None: ...


@app.worker(use_task_event=False)
async def mail(to: str, subject: str = "") -> bool:
    return True


class Import:
    def perform(self, item: Product) -> str:
        return item.sku


importer = app.worker(Import)
product = Product(sku="A")

bare(1)  # wrong
bare.perform_async(1)  # wrong
bare.perform_async()  # wrong
bare.perform_async(product, product)  # wrong
bare.delay("A")  # wrong
bare.perform_async(product=product)  # wrong
bare.set(queue="low").perform_async("A")  # wrong
bare.set(colour="red")  # wrong
bare.set(queue=7)  # wrong
mail.perform_in(60)  # wrong
mail.perform_in(60, 1)  # wrong
mail.perform_in("soon", "you")  # wrong
mail.perform_at(60, "you", 2)  # wrong
mail.perform_async("you", title="x")  # wrong
importer.perform_async(1)  # wrong
wanted: int = bare(product)  # wrong

app.submit(bare, [1])  # wrong
app.submit(bare, ["A"])  # wrong
app.submit(bare, [Order(number=1)])  # wrong
app.submit(bare, product)  # wrong
app.submit(number, ["one"])  # wrong
app.submit(number, [{"item": 1}])  # wrong
app.submit(importer, [Order(number=1)])  # wrong
app.check(bare, [1])  # wrong
result: int = app.submit(bare, [product], dry_run=True)  # wrong

app.submit(bare, [product], paralel=3)  # wrong
app.submit(bare, [product], parallel="3")  # wrong
app.submit("bare", [1], paralel=3)  # wrong
app.submit_jobs([(bare, product)], paralel=3)  # wrong
app.submit_items("bare", [{}], paralel=3)  # wrong
app.check(bare, [product], paralel=3)  # wrong
bare.submit([1])  # wrong
bare.submit([product], paralel=3)  # wrong
app.submit(bare, [product]).counts["finnish"]  # wrong

app.worker(queue=1)  # wrong
app.worker(retries=3)  # wrong
app.worker(3)  # wrong


@app.worker(timeout="long")  # wrong
def late(item: dict[str, Any]) -> None: ...


first: int = current_job().args  # wrong
