"""The shop's web application: ``flask --app shop.web run``."""

import os
import secrets
from datetime import date
from typing import Any

import click
from flask import Blueprint, Flask, Request, abort, flash, redirect, render_template, request, url_for
from flask import session as cookie
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.security import check_password_hash

import webapi
from asynctask.errors import InputError
from shop.jobs import app as tasks
from shop.jobs import enrol_product, price_list_shards
from shop.models import User, prepare, session

pages = Blueprint("pages", __name__, cli_group=None)


@pages.before_request
def require_login() -> Any:
    """Sends those who are not logged in to the login."""
    if "user" not in cookie and request.endpoint != "pages.log_in":
        return redirect(url_for("pages.log_in"))
    return None


@pages.route("/login", methods=["GET", "POST"])
def log_in() -> Any:
    """The form, and what it sends."""
    if request.method == "GET":
        return render_template("login.html")
    with session() as db:
        user = db.get(User, request.form["name"])
    if user is None or not check_password_hash(user.password_hash, request.form["password"]):
        flash("The name or the password is wrong.")
        return redirect(url_for("pages.log_in"))
    cookie["user"] = user.name
    return redirect(url_for("pages.index"))


@pages.post("/logout")
def log_out() -> Any:
    """Ends the login."""
    cookie.clear()
    return redirect(url_for("pages.log_in"))


@pages.get("/")
def index() -> str:
    """The forms, and the user's Tasks."""
    return render_template("index.html", tasks=tasks.tasks(owner=cookie["user"], limit=20))


@pages.post("/enrolments")
def enrol() -> Any:
    """Submits a sheet: one Task."""
    sheet, user = request.files["sheet"], cookie["user"]
    try:
        until = date.fromisoformat(request.form["until"])
    except ValueError:
        flash("Write the last day of the sale as 2027-05-31.")
        return redirect(url_for("pages.index"))
    try:
        stored = tasks.uploads.store(sheet.stream, sheet.filename or "sheet")
        task = tasks.submit_file(enrol_product, stored, owner=user, context={"until": until.isoformat()})
    except InputError as error:  # it is no sheet, or no row can be accepted
        flash(f"The sheet was not accepted: {error}")
        return redirect(url_for("pages.index"))
    return redirect(url_for("pages.follow", task_id=task.id))


@pages.post("/price-lists")
def export() -> Any:
    """Submits an export: one Task."""
    shards = price_list_shards()
    task = tasks.submit_export("price_list", shards, format="xlsx", title="Price list", owner=cookie["user"])
    return redirect(url_for("pages.follow", task_id=task.id))


@pages.get("/tasks/<int:task_id>")
def follow(task_id: int) -> str:
    """The page of one Task of the user."""
    found = tasks.tasks(ids=[task_id], owner=cookie["user"])
    if not found:
        abort(404)
    return render_template("task.html", task=found[0])


@pages.cli.command("prepare")
@click.option("--user", default="ann")
@click.password_option()
def prepare_shop(user: str, password: str) -> None:
    """Creates the tables, some products, and a user."""
    prepare(user, password)


def create_app() -> Flask:
    """The shop's pages, and the API of its Tasks below ``/bulk``."""
    shop = Flask(__name__)
    shop.config.update(
        SECRET_KEY=os.environ.get("SHOP_SECRET_KEY") or secrets.token_hex(),  # without it, a restart ends all logins
        SESSION_COOKIE_SAMESITE="Lax",  # other sites cannot post in a user's name
    )
    shop.register_blueprint(pages)

    def authorize(request: Request) -> webapi.User | None:
        with shop.request_context(request.environ):
            user = cookie.get("user")
        return None if user is None else webapi.User(user, owner=user, rights={"read"})

    api = webapi.create_app(tasks, authorize=authorize)
    shop.wsgi_app = DispatcherMiddleware(shop.wsgi_app, {"/bulk": api})  # type: ignore[method-assign]
    return shop
