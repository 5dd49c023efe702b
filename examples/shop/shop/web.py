"""The shop's web application: a login, an upload, and a page that follows a Task: ``flask --app shop.web run``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from flask import Flask, Request, abort, flash, redirect, render_template, request, url_for
from flask import session as cookie
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.security import check_password_hash

import webapi
from asynctask.errors import InputError, NotFound
from shop.jobs import app as tasks
from shop.jobs import enrol_product, price_list_shards
from shop.models import User, prepare, session

View = Callable[..., Any]


def create_app() -> Flask:
    """The shop, with the API of its Tasks below ``/bulk``."""
    shop = Flask(__name__)
    shop.config.update(
        SECRET_KEY=os.environ.get("SHOP_SECRET_KEY") or secrets.token_hex(),  # without it, a restart ends all logins
        SESSION_COOKIE_SAMESITE="Lax",  # other sites cannot post in a user's name
    )
    add_views(shop)
    add_tasks(shop)
    api = webapi.create_app(tasks, authorize=api_users(shop))
    shop.wsgi_app = DispatcherMiddleware(shop.wsgi_app, {"/bulk": api})  # type: ignore[method-assign]

    @shop.cli.command("prepare")
    @click.option("--user", default="ann")
    @click.option("--password", prompt=True, hide_input=True)
    def prepare_shop(user: str, password: str) -> None:
        """Creates the tables, a user and some products."""
        prepare(user, password)
        click.echo(f"Ready: log in as {user}.")

    return shop


# -- who may see what


def api_users(shop: Flask) -> Callable[[Request], webapi.User | None]:
    """Tells the API who sends a request: users, who read their own Tasks there, and submit on the pages of the shop."""

    def authorize(request: Request) -> webapi.User | None:
        with shop.request_context(request.environ):
            user = cookie.get("user")
        return None if user is None else webapi.User(user, owner=user, rights={"read"})

    return authorize


def owner_of(task_id: int) -> str | None:
    """Who has submitted a Task; None if there is none."""
    try:
        return str(tasks.progress(task_id)["owner"])
    except NotFound:
        return None


def for_users(view: View) -> View:
    """A view for those who are logged in; it gets the user's name."""

    @wraps(view)
    def guarded(**arguments: Any) -> Any:
        if "user" not in cookie:
            return redirect(url_for("log_in"))
        return view(cookie["user"], **arguments)

    return guarded


# -- views


def add_views(shop: Flask) -> None:
    """Login and logout."""

    @shop.get("/login")
    def log_in() -> str:
        return render_template("login.html")

    @shop.post("/login")
    def check_login() -> Any:
        with session() as db:
            user = db.get(User, request.form.get("name", ""))
        if user is None or not check_password_hash(user.password_hash, request.form.get("password", "")):
            flash("The name or the password is wrong.")
            return redirect(url_for("log_in"))
        cookie["user"] = user.name
        return redirect(url_for("index"))

    @shop.post("/logout")
    def log_out() -> Any:
        cookie.clear()
        return redirect(url_for("log_in"))


def add_tasks(shop: Flask) -> None:
    """The user's Tasks: the list, a form for a sheet, an export, and a page that follows one."""

    @shop.get("/")
    @for_users
    def index(user: str) -> str:
        return render_template("index.html", user=user, tasks=tasks.tasks(owner=user, limit=20))

    @shop.post("/enrolments")
    @for_users
    def enrol(user: str) -> Any:
        sheet = request.files.get("sheet")
        if sheet is None or not sheet.filename:
            flash("Choose a sheet first.")
            return redirect(url_for("index"))
        try:
            stored = tasks.uploads.store(sheet.stream, sheet.filename)
            task = tasks.submit_file(enrol_product, stored, title=sheet.filename, owner=user)
        except InputError as error:  # no row can be accepted, or it is no sheet
            flash(f"The sheet was not accepted: {error}")
            return redirect(url_for("index"))
        return redirect(url_for("follow", task_id=task.id))

    @shop.post("/price-lists")
    @for_users
    def export(user: str) -> Any:
        task = tasks.submit_export("price_list", price_list_shards(), format="xlsx", title="price list", owner=user)
        return redirect(url_for("follow", task_id=task.id))

    @shop.get("/tasks/<int:task_id>")
    @for_users
    def follow(user: str, task_id: int) -> str:
        if owner_of(task_id) != user:
            abort(404)
        return render_template("task.html", user=user, task=tasks.progress(task_id))
