# SPDX-License-Identifier: Apache-2.0
"""Signals: HUP, TERM, INT, QUIT, USR1, USR2, alone and repeated."""

import signal
import time

from case import JANITOR_S, check, dropped, same


@check("signal/hup-reloads")
def hup(t):
    p = t.pooler()
    p.settings["default_pool_size"] = 11
    p.write_ini()
    p.signal(signal.SIGHUP)
    p.wait_log("got SIGHUP, re-reading config")
    shown = {row["key"]: row["value"] for row in p.admin("SHOW CONFIG")}
    same(shown["default_pool_size"], "11")


@check("signal/hup-with-broken-file")
def hup_broken(t):
    p = t.pooler()
    p.raw = "[broken"
    p.write_ini()
    p.signal(signal.SIGHUP)
    p.wait_log("got SIGHUP")
    t.connect(p).query("SELECT 1")


@check("signal/term-waits-for-clients")
def term(t):
    p = t.tx()
    client = t.connect(p)
    client.query("SELECT 1")
    p.signal(signal.SIGTERM)
    p.wait_log("got SIGTERM, shutting down, waiting for all clients disconnect")
    time.sleep(JANITOR_S)
    client.query("SELECT 1")
    assert p.running()
    client.close()
    same(p.exited(), 0)


@check("signal/term-twice")
def term_twice(t):
    p = t.tx()
    client = t.connect(p)
    client.query("BEGIN")
    p.signal(signal.SIGTERM)
    p.wait_log("got SIGTERM, shutting down")
    p.signal(signal.SIGTERM)
    same(p.exited(), 0)
    p.wait_log("got SIGTERM while shutting down, fast exit")


@check("signal/term-without-clients")
def term_idle(t):
    p = t.tx()
    t.connect(p).close()
    p.signal(signal.SIGTERM)
    same(p.exited(), 0)


@check("signal/int-waits-for-servers")
def interrupt(t):
    p = t.tx()
    busy, idle = t.connect(p), t.connect(p)
    idle.query("SELECT 1")
    busy.query("BEGIN")
    p.signal(signal.SIGINT)
    p.wait_log("got SIGINT, shutting down")
    busy.query("SELECT 1")
    busy.query("COMMIT")
    same(p.exited(), 0)


@check("signal/int-twice")
def interrupt_twice(t):
    p = t.tx()
    client = t.connect(p)
    client.query("BEGIN")
    p.signal(signal.SIGINT)
    p.wait_log("got SIGINT, shutting down")
    p.signal(signal.SIGINT)
    same(p.exited(), 0)
    p.wait_log("got SIGINT while shutting down, fast exit")


@check("signal/int-queued-clients-told")
def interrupt_waiting(t):
    p = t.tx({"default_pool_size": 1})
    busy, queued = t.connect(p), t.connect(p)
    busy.query("BEGIN")
    queued.send("Q", b"SELECT 1\0")
    time.sleep(0.1)
    p.signal(signal.SIGINT)
    dropped("server shutting down", queued)
    busy.query("COMMIT")
    same(p.exited(), 0)


@check("signal/quit-at-once")
def quit_at_once(t):
    p = t.tx()
    client = t.connect(p)
    client.query("BEGIN")
    p.signal(signal.SIGQUIT)
    same(p.exited(), 0)
    p.wait_log("got SIGQUIT, fast exit")
    dropped(None, client)


@check("signal/usr1-usr2-pause-and-resume")
def usr(t):
    p = t.tx()
    client = t.connect(p)
    client.query("SELECT 1")
    p.signal(signal.SIGUSR1)
    p.wait_log("got SIGUSR1, pausing all activity")
    call = t.background(client.query, "SELECT 1")
    assert call.blocked(), "a query ran while paused"
    p.signal(signal.SIGUSR2)
    p.wait_log("got SIGUSR2, continuing from PAUSE")
    call.result()


@check("signal/usr-repeated")
def usr_repeated(t):
    p = t.tx()
    p.signal(signal.SIGUSR2)
    p.wait_log("got SIGUSR2, but not paused/suspended")
    p.signal(signal.SIGUSR1)
    p.wait_log("got SIGUSR1, pausing")
    p.signal(signal.SIGUSR1)
    p.wait_log("got SIGUSR1, but already paused/suspended")


@check("signal/usr2-while-shutting-down")
def usr2_shutdown(t):
    p = t.tx()
    client = t.connect(p)
    client.query("BEGIN")
    p.signal(signal.SIGINT)
    p.wait_log("got SIGINT")
    p.signal(signal.SIGUSR2)
    p.wait_log("got SIGUSR2 while shutting down, ignoring")
    assert p.running()
