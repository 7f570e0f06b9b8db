// SPDX-License-Identifier: Apache-2.0
use super::parked::OWN_FOR;
use super::*;
use crate::idle::SharedIdle;

fn limits() -> PoolLimits {
    PoolLimits {
        size: 2,
        size_min: 0,
        reserve: 1,
        reserve_timeout: Duration::from_secs(5),
        database_max: 0,
        user_max: 0,
        lifetime: Duration::from_secs(3600),
        idle_timeout: Duration::from_secs(600),
        check_delay: Some(Duration::from_secs(30)),
        round_robin: false,
        login_retry: Duration::from_secs(15),
    }
}

fn client(slot: u32) -> ClientRef {
    ClientRef { worker: 0, slot, generation: 1 }
}

/// Opens a connection for whoever waits and returns what became of it.
fn open(core: &mut Core<u32>, pool: PoolId, name: u32, now: Instant) -> (ServerId, Released<u32>) {
    match core.launch(pool, now) {
        Launch::Open { id, .. } => (id, core.release(id, name, now)),
        other => panic!("expected a launch, got {other:?}"),
    }
}

fn queue(core: &mut Core<u32>, pool: PoolId, who: u32, now: Instant) -> Ticket {
    match core.acquire(pool, client(who), None, now) {
        Acquired::Queued(ticket) => ticket,
        granted => panic!("expected to wait, got {granted:?}"),
    }
}

#[test]
fn first_come_first_served() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    (1..=4).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let (a, first) = open(&mut core, pool, 100, now);
    assert!(matches!(first, Released::Grant { client: c, .. } if c == client(1)));
    let (_, second) = open(&mut core, pool, 101, now);
    assert!(matches!(second, Released::Grant { client: c, .. } if c == client(2)));
    assert!(matches!(core.launch(pool, now), Launch::Not), "pool_size is reached");
    assert!(matches!(core.release(a, 100, now), Released::Grant { client: c, .. } if c == client(3)));
    assert!(matches!(core.release(a, 100, now), Released::Grant { client: c, .. } if c == client(4)));
    assert!(matches!(core.release(a, 100, now), Released::Parked));
    match core.acquire(pool, client(9), None, now + Duration::from_secs(31)) {
        Acquired::Granted { id, server: 100, check: true } => assert_eq!(id, a),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_that_left_is_not_granted() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    let ticket = queue(&mut core, pool, 1, now);
    queue(&mut core, pool, 2, now);
    assert!(core.cancel_wait(pool, ticket, client(1)));
    assert!(!core.cancel_wait(pool, ticket, client(1)));
    let (_, released) = open(&mut core, pool, 7, now);
    assert!(matches!(released, Released::Grant { client: c, .. } if c == client(2)));
}

#[test]
fn reserve_opens_after_the_timeout_only() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    (1..=3).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    open(&mut core, pool, 1, now);
    open(&mut core, pool, 2, now);
    assert!(matches!(core.launch(pool, now + Duration::from_secs(4)), Launch::Not));
    assert!(matches!(
        core.launch(pool, now + Duration::from_secs(5)),
        Launch::Open { from_reserve: true, .. }
    ));
    assert!(
        matches!(core.launch(pool, now + Duration::from_secs(9)), Launch::Not),
        "one login serves the one that waits"
    );
}

#[test]
fn reserve_connections_stay_until_they_are_idle_for_too_long() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    (1..=3).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let opened = [1, 2, 3].map(|name| open(&mut core, pool, name, now + Duration::from_secs(5)).0);
    assert_eq!(core.connections(pool), 3);
    for (id, name) in opened.into_iter().zip(1..) {
        assert!(matches!(core.release(id, name, now + Duration::from_secs(6)), Released::Parked));
    }
    assert!(core.expire(pool, now + Duration::from_secs(7)).is_empty());
    let smaller = PoolLimits { size: 1, ..limits() };
    core.set_limits(pool, smaller);
    let shrunk = core.expire(pool, now + Duration::from_secs(8));
    assert_eq!(shrunk.iter().map(|(.., reason)| *reason).collect::<Vec<_>>(), [CloseReason::PoolShrunk]);
}

#[test]
fn a_full_database_evicts_from_another_pool() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let two = || PoolLimits { database_max: 1, ..limits() };
    let first = core.pool(1, 1, two);
    let second = core.pool(1, 2, two);
    queue(&mut core, first, 1, now);
    let (id, _) = open(&mut core, first, 10, now);
    queue(&mut core, second, 2, now);
    assert!(matches!(core.launch(second, now), Launch::Not), "the one connection is in use");
    assert!(matches!(core.release(id, 10, now), Released::Parked));
    assert!(matches!(core.launch(second, now), Launch::Evict(victim, 10) if victim == id));
    assert!(matches!(core.launch(second, now), Launch::Open { .. }));
    assert_eq!(core.database_connections(1), 1);
}

/// Of all pools, whatever their order; if a program of a lane is faster, the next.
#[test]
fn the_connection_that_was_idle_for_longest_makes_room() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let three = || PoolLimits { database_max: 3, ..limits() };
    let pools = [1, 2, 3, 4].map(|user| core.pool(1, user, three));
    let told = std::sync::Arc::<std::sync::Mutex<Told>>::default();
    core.share_idle(pools[2], Box::new(Lane { shared: told.clone(), ..Lane::default() }));
    let after = |seconds| now + Duration::from_secs(seconds);
    let idle = |core: &mut Core<u32>, pool, name, since| {
        queue(core, pool, name, now);
        let (id, _) = open(core, pool, name, now);
        assert!(matches!(core.release(id, name, since), Released::Parked));
    };
    for (pool, name, since) in [(pools[0], 10, 3), (pools[1], 20, 2), (pools[2], 30, 1)] {
        idle(&mut core, pool, name, after(since));
    }
    queue(&mut core, pools[3], 1, now);
    told.lock().unwrap().faster = true;
    let evicted = core.launch(pools[3], after(4));
    assert!(matches!(evicted, Launch::Evict(_, 20)), "{evicted:?}");
    told.lock().unwrap().faster = false;
    idle(&mut core, pools[1], 21, after(4));
    let evicted = core.launch(pools[3], after(5));
    assert!(matches!(evicted, Launch::Evict(_, 30)), "{evicted:?}");
    assert!(matches!(core.launch(pools[3], after(5)), Launch::Open { .. }));
    let evicted = core.open_dedicated(pools[1], after(5));
    assert!(matches!(evicted, Launch::Evict(_, 10)), "not its own pool's, which was used later: {evicted:?}");
}

#[test]
fn the_minimum_of_a_pool_evicts_nobody_and_opens_no_reserve() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let one = || PoolLimits { database_max: 1, size_min: 1, ..limits() };
    let [first, second] = [1, 2].map(|user| core.pool(1, user, one));
    let (id, _) = open(&mut core, first, 10, now);
    assert!(matches!(core.release(id, 10, now), Released::Parked));
    assert!(matches!(core.launch(second, now), Launch::Not), "the other's idle connection is left alone");
    queue(&mut core, second, 1, now);
    assert!(matches!(core.launch(second, now), Launch::Evict(victim, 10) if victim == id));
    assert!(matches!(core.launch(first, now), Launch::Not), "the room is another's, who waits");
    assert!(matches!(core.launch(second, now), Launch::Open { .. }));

    let small = || PoolLimits { size: 1, size_min: 2, reserve_timeout: Duration::ZERO, ..limits() };
    let third = core.pool(2, 1, small);
    open(&mut core, third, 20, now);
    assert!(matches!(core.launch(third, now), Launch::Not), "nobody waits for the reserve");
}

#[test]
fn a_pool_that_nobody_uses_keeps_no_minimum() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size_min: 1, ..limits() });
    core.keep_minimum(pool, false);
    assert!(matches!(core.launch(pool, now), Launch::Not));
    core.keep_minimum(pool, true);
    assert!(matches!(core.launch(pool, now), Launch::Open { .. }));
}

#[test]
fn a_cancelled_server_is_held_until_the_request_is_done() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 10, now);
    assert!(core.cancel_begun(id));
    queue(&mut core, pool, 2, now);
    assert!(matches!(core.release(id, 10, now), Released::Held(10)));
    assert_eq!(core.counts(pool, now).being_canceled, 1);
    assert!(core.cancel_done(id));
    assert!(matches!(core.release(id, 10, now), Released::Grant { .. }));
}

#[test]
fn failed_logins_are_retried_one_at_a_time_after_a_pause() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    queue(&mut core, pool, 2, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.closed(id, true, now);
    assert!(matches!(core.launch(pool, now + Duration::from_secs(14)), Launch::Not));
    assert!(matches!(core.launch(pool, now + Duration::from_secs(15)), Launch::Open { .. }));
    assert!(matches!(core.launch(pool, now + Duration::from_secs(15)), Launch::Not));
}

#[test]
fn who_asks_whether_there_is_a_server_waits_for_the_next_attempt() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.closed(id, true, now);
    assert!(core.is_failing(pool));

    let (asked, later) = (now + Duration::from_secs(5), now + Duration::from_secs(15));
    assert!(matches!(core.acquire_to_learn(pool, client(2), asked), Acquired::Queued(_)));
    assert!(matches!(core.launch(pool, asked), Launch::Not), "neither refused, nor before its time");
    assert!(!core.has_failed_since(pool, asked));
    let Launch::Open { id, .. } = core.launch(pool, later) else { panic!() };
    core.closed(id, true, later);
    assert!(core.has_failed_since(pool, asked));
}

#[test]
fn who_queues_for_an_obsolete_server_while_logins_fail_is_refused_when_it_closes() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (old, _) = open(&mut core, pool, 10, now);
    core.obsolete(pool);
    let before = queue(&mut core, pool, 2, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.closed(id, true, now);
    assert!(!core.is_failing(pool), "the obsolete server still stands");
    let after = queue(&mut core, pool, 3, now);
    assert!(matches!(core.launch(pool, now), Launch::Not), "it may still come free");

    assert!(matches!(core.release(old, 10, now), Released::Close(10, CloseReason::CloseNeeded)));
    assert!(core.is_failing(pool));
    match core.launch(pool, now) {
        Launch::Refuse(clients) => assert_eq!(clients, [(client(3), after)]),
        other => panic!("{other:?}"),
    }
    assert!(
        matches!(core.launch(pool, now), Launch::Not),
        "who queued before the failure waits for the next attempt"
    );
    let Launch::Open { id, .. } = core.launch(pool, now + Duration::from_secs(15)) else { panic!() };
    assert!(matches!(core.release(id, 11, now), Released::Grant { client: c, .. } if c == client(2)));
    assert!(!core.cancel_wait(pool, before, client(2)));
}

/// The server goes, PAUSE, another comes in its place, RESUME.
#[test]
fn who_waits_through_a_pause_is_not_refused_for_a_failure_before_it() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (old, _) = open(&mut core, pool, 10, now);
    queue(&mut core, pool, 2, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.closed(id, true, now);
    let hopeful = queue(&mut core, pool, 3, now);
    core.set_paused(pool, true);
    core.closed(old, false, now);
    queue(&mut core, pool, 4, now);
    let later = now + Duration::from_secs(15);
    assert!(core.retry(pool, later).is_none(), "nothing is opened in a pause");
    assert!(!core.last_connect_failed(pool));

    core.set_paused(pool, false);
    assert!(core.is_failing(pool), "who comes only now is refused as before");
    assert!(!core.last_connect_failed(pool), "those who wait are not: nothing was tried since");
    assert!(matches!(core.launch(pool, now), Launch::Not));
    let Launch::Open { id, .. } = core.launch(pool, later) else { panic!() };
    core.closed(id, true, later);
    assert!(core.last_connect_failed(pool));
    assert!(matches!(core.launch(pool, later), Launch::Not), "they wait for the next attempt, too");
    let (id, granted) = open(&mut core, pool, 11, later + Duration::from_secs(15));
    assert!(matches!(granted, Released::Grant { client: c, .. } if c == client(2)));
    assert!(matches!(core.release(id, 11, later), Released::Grant { client: c, .. } if c == client(3)));
    assert!(matches!(core.release(id, 11, later), Released::Grant { client: c, .. } if c == client(4)));
    assert!(!core.cancel_wait(pool, hopeful, client(3)));
}

#[test]
fn who_queues_between_a_refusal_and_its_second_try_is_refused_with_it() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    let before = queue(&mut core, pool, 1, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.refused(id);
    assert!(!core.is_failing(pool), "the second try may succeed");
    let between = queue(&mut core, pool, 2, now);
    core.closed(id, true, now);
    match core.launch(pool, now) {
        Launch::Refuse(clients) => assert_eq!(clients, [(client(2), between)]),
        other => panic!("{other:?}"),
    }
    assert!(core.cancel_wait(pool, before, client(1)), "it queued before anything failed");
}

#[test]
fn who_queues_between_a_refusal_and_a_second_try_that_succeeds_waits_as_any_other() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let Launch::Open { id, .. } = core.launch(pool, now) else { panic!() };
    core.refused(id);
    let between = queue(&mut core, pool, 2, now);
    assert!(matches!(core.release(id, 10, now), Released::Grant { client: c, .. } if c == client(1)));
    let Launch::Open { id: next, .. } = core.launch(pool, now) else { panic!() };
    core.closed(id, false, now);
    core.closed(next, true, now);
    assert!(core.is_failing(pool));
    assert!(matches!(core.launch(pool, now), Launch::Not), "nothing had failed for good when it queued");
    assert!(core.cancel_wait(pool, between, client(2)));
}

#[test]
fn lifetime_idle_timeout_and_obsolete() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 10, now);
    assert!(matches!(core.release(id, 10, now), Released::Parked));
    assert!(core.expire(pool, now + Duration::from_secs(599)).is_empty());
    let expired = core.expire(pool, now + Duration::from_secs(600));
    assert!(matches!(expired[..], [(_, 10, CloseReason::IdleTimeout)]));
    assert_eq!(core.connections(pool), 0);

    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 11, now);
    assert!(core.obsolete(pool).is_empty(), "it is in use");
    assert!(matches!(core.release(id, 11, now), Released::Close(11, CloseReason::CloseNeeded)));
    assert!(matches!(core.release(id, 11, now), Released::Close(..)), "a stale identity is never taken back");
    assert_eq!(core.connections(pool), 0);
}

#[test]
fn connections_made_together_do_not_end_together() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size: 3, idle_timeout: Duration::ZERO, ..limits() });
    let after = |seconds| now + Duration::from_secs(seconds);
    (1..=3).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let opened = [1, 2, 3].map(|name| open(&mut core, pool, name, now).0);
    assert!(matches!(core.release(opened[0], 1, after(1)), Released::Parked));
    assert!(matches!(core.release(opened[1], 2, after(1)), Released::Parked));
    let first = core.expire(pool, after(3600));
    assert!(matches!(first[..], [(_, 1, CloseReason::Lifetime)]), "{first:?}");
    // Of three, one goes every 20 minutes.
    assert!(core.expire(pool, after(4799)).is_empty());
    assert!(matches!(core.release(opened[2], 3, after(4799)), Released::Parked), "nor one that was in use");
    assert_eq!(core.expire(pool, after(4800)).len(), 1);
    assert_eq!(core.expire(pool, after(6000)).len(), 1);
    assert_eq!(core.connections(pool), 0);
}

#[test]
fn a_pool_without_a_limit_keeps_no_minimum_and_ages_without_pauses() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let unlimited = || PoolLimits { size: PoolLimits::UNLIMITED, size_min: 2, reserve: 5, ..limits() };
    let pool = core.pool(1, 1, unlimited);
    assert!(matches!(core.launch(pool, now), Launch::Not));
    (1..=3).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let ids = [1, 2, 3].map(|name| open(&mut core, pool, name, now).0);
    for (id, name) in ids.into_iter().zip(1..) {
        assert!(matches!(core.release(id, name, now), Released::Parked));
    }
    assert_eq!(core.expire(pool, now + Duration::from_secs(3600)).len(), 3);
}

#[test]
fn old_servers_close_wherever_they_are_and_the_others_stay() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size: 4, ..limits() });
    (1..=4).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let ids = [10, 11, 12, 13].map(|name| open(&mut core, pool, name, now).0);
    assert!(matches!(core.release(ids[0], 10, now), Released::Parked));
    assert!(matches!(core.release(ids[1], 11, now), Released::Parked));
    let later = now + Duration::from_secs(1);
    let taken = core.retire_old(pool, later, |&server| server % 2 == 0);
    assert_eq!(taken, [(ids[0], 10)], "of the idle ones, the old one goes at once");
    // These were on their way between two threads, who asked neither of them.
    assert!(matches!(core.release(ids[2], 12, later), Released::Close(12, CloseReason::CloseNeeded)));
    assert!(matches!(core.release(ids[3], 13, later), Released::Parked));

    (1..=3).for_each(|who| match core.acquire(pool, client(who), None, later) {
        Acquired::Granted { .. } | Acquired::Linked(_) | Acquired::Queued(_) => {}
    });
    let after = later + Duration::from_secs(1);
    let (new, granted) = open(&mut core, pool, 14, after);
    assert!(matches!(granted, Released::Grant { .. }), "what is opened afterwards is not old");
    core.retire(new);
    assert!(matches!(core.release(new, 14, after), Released::Close(14, CloseReason::CloseNeeded)));
}

#[test]
fn pause_queues_and_resume_grants() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 10, now);
    core.set_paused(pool, true);
    queue(&mut core, pool, 2, now);
    assert!(matches!(core.release(id, 10, now), Released::Parked));
    assert!(matches!(core.launch(pool, now), Launch::Not));
    core.set_paused(pool, false);
    let parked = core.unpark(id, |_| true).expect("parked");
    assert!(matches!(core.release(id, parked, now), Released::Grant { client: c, .. } if c == client(2)));
}

#[test]
fn a_client_gets_the_lowest_server_that_is_at_home_at_its_worker() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let of_worker = |worker, slot| ClientRef { worker, slot, generation: 1 };
    let ask = |core: &mut Core<u32>, pool, who| match core.acquire(pool, who, None, now) {
        Acquired::Granted { id, server, .. } => (id, server),
        other => panic!("{other:?}"),
    };
    let pool = core.pool(1, 1, limits);
    for (worker, name) in [(0, 100), (1, 101)] {
        assert!(matches!(core.acquire(pool, of_worker(worker, 1), None, now), Acquired::Queued(_)));
        let (id, granted) = open(&mut core, pool, name, now);
        assert!(matches!(granted, Released::Grant { .. }));
        // While it is in use nobody else's is idle, so the second client gets one of its own.
        if worker == 1 {
            assert!(matches!(core.release(id, name, now), Released::Parked));
            let first = ServerId { ordinal: 0, ..id };
            assert!(matches!(core.release(first, 100, now), Released::Parked));
        }
    }
    let (near, server) = ask(&mut core, pool, of_worker(1, 2));
    assert_eq!((near.ordinal, server), (1, 101), "the first is lower, but at home elsewhere");
    let (far, server) = ask(&mut core, pool, of_worker(1, 3));
    assert_eq!((far.ordinal, server), (0, 100), "any is better than none");
    core.release(near, 101, now);
    core.release(far, 100, now);
    assert_eq!(ask(&mut core, pool, of_worker(1, 4)).1, 100, "both are at home there now: the lowest");
}

/// A pool with two idle servers: 100, which client 1 had last, and 101, which client 2 had, both given back at `now`.
fn two_idle(core: &mut Core<u32>, limits: impl FnOnce() -> PoolLimits, now: Instant) -> PoolId {
    let pool = core.pool(1, 1, limits);
    queue(core, pool, 1, now);
    queue(core, pool, 2, now);
    let (first, _) = open(core, pool, 100, now);
    let (second, _) = open(core, pool, 101, now);
    assert!(matches!(core.release(first, 100, now), Released::Parked));
    assert!(matches!(core.release(second, 101, now), Released::Parked));
    pool
}

/// Which server a client gets that would rather have one that fits; it is given back at once.
fn given(core: &mut Core<u32>, pool: PoolId, who: ClientRef, fits: u32, now: Instant) -> u32 {
    match core.acquire_fitting(pool, who, None, |&server| server == fits, now) {
        Acquired::Granted { id, server, .. } => {
            assert!(matches!(core.release(id, server, now), Released::Parked));
            server
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_comes_back_at_once_gets_its_own_server_and_later_the_lowest() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = two_idle(&mut core, limits, now);
    let soon = now + OWN_FOR - Duration::from_micros(1);
    assert_eq!(
        given(&mut core, pool, client(2), 100, soon),
        101,
        "its own, though the other is lower and fits"
    );
    let successor = ClientRef { generation: 2, ..client(2) };
    assert_eq!(given(&mut core, pool, successor, 0, soon), 100, "who has another's place is another");
    assert_eq!(given(&mut core, pool, client(2), 0, soon), 101, "still its own");
    assert_eq!(given(&mut core, pool, client(2), 0, soon + OWN_FOR), 100, "so that one may rest");
}

#[test]
fn a_server_that_fits_goes_before_a_lower_one_that_does_not() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = two_idle(&mut core, limits, now);
    let later = now + OWN_FOR;
    assert_eq!(given(&mut core, pool, client(3), 101, later), 101);
    assert_eq!(given(&mut core, pool, client(4), 7, later), 100, "none fits: the lowest");
    let far = ClientRef { worker: 1, ..client(5) };
    assert_eq!(given(&mut core, pool, far, 101, later), 100, "to change parameters costs less than to move");
}

#[test]
fn round_robin_passes_nobody_over() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = two_idle(&mut core, || PoolLimits { round_robin: true, ..limits() }, now);
    let turns: Vec<_> = (0..4).map(|_| given(&mut core, pool, client(2), 101, now)).collect();
    assert_eq!(turns, [100, 101, 100, 101]);
}

#[test]
fn two_limits_may_take_two_victims() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let one = || PoolLimits { database_max: 1, user_max: 1, ..limits() };
    // Database 1 is full by another user, user 1 by another database.
    let [of_database, of_user, wanted] =
        [(1, 2), (2, 1), (1, 1)].map(|(database, user)| core.pool(database, user, one));
    for (pool, server) in [(of_database, 10), (of_user, 20)] {
        queue(&mut core, pool, server, now);
        let (id, _) = open(&mut core, pool, server, now);
        assert!(matches!(core.release(id, server, now), Released::Parked));
    }
    queue(&mut core, wanted, 1, now);
    assert!(matches!(core.launch(wanted, now), Launch::Evict(_, 10)));
    assert!(matches!(core.launch(wanted, now), Launch::Evict(_, 20)));
    assert!(matches!(core.launch(wanted, now), Launch::Open { .. }));
}

#[test]
fn a_dedicated_connection_takes_the_place_of_an_idle_one() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size: 1, reserve: 0, ..limits() });
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 10, now);
    assert!(matches!(core.open_dedicated(pool, now), Launch::Not), "it is in use");
    assert!(matches!(core.release(id, 10, now), Released::Parked));
    assert!(matches!(core.open_dedicated(pool, now), Launch::Evict(_, 10)));
    assert!(matches!(core.open_dedicated(pool, now), Launch::Open { .. }));
}

/// An idle set as a lane's: the test plays the programs.
#[derive(Debug, Default)]
struct Lane {
    idle: std::collections::BTreeSet<u32>,
    /// Bits that no server has any more.
    stale: Vec<u32>,
    shared: std::sync::Arc<std::sync::Mutex<Told>>,
}

#[derive(Debug, Default)]
struct Told {
    retired: Vec<u32>,
    occupied: Vec<u32>,
    /// Programs are faster than whoever wants a certain server.
    faster: bool,
    full: Option<u32>,
    served: u32,
}

impl SharedIdle<u32> for Lane {
    fn push(&mut self, ordinal: u32, _: &mut u32) -> bool {
        self.idle.insert(ordinal)
    }
    fn link_lowest(&mut self, _: u64) -> Option<u32> {
        self.idle.pop_first()
    }
    fn pop_from(&mut self, _: u32) -> Option<u32> {
        self.idle.pop_first()
    }
    /// What it knows of parameters: each has its ordinal for a fingerprint.
    fn pop_unlike(&mut self, fingerprint: u32) -> Option<u32> {
        let ordinal = *self.idle.iter().find(|&&ordinal| ordinal != fingerprint)?;
        self.idle.take(&ordinal)
    }
    fn remove(&mut self, ordinal: u32) -> bool {
        !self.shared.lock().unwrap().faster && self.idle.remove(&ordinal)
    }
    fn ordinals(&self) -> Vec<u32> {
        self.idle.iter().chain(&self.stale).copied().collect()
    }
    fn set_waiters(&self, _: u32) {}
    fn set_closed(&self, _: bool) {}
    fn set_full(&self, full: Option<u32>) {
        self.shared.lock().unwrap().full = full;
    }
    fn serve(&self) {
        self.shared.lock().unwrap().served += 1;
    }
    fn retire(&self, ordinal: u32) {
        self.shared.lock().unwrap().retired.push(ordinal);
    }
    fn set_aside(&mut self, _: u32, _: &mut u32) {}
    fn returned_at(&self, _: u32) -> Option<Instant> {
        None
    }
    fn forget(&mut self, _: u32) {}
    fn is_occupied(&self, ordinal: u32) -> bool {
        self.shared.lock().unwrap().occupied.contains(&ordinal)
    }
}

/// A pool in a lane, and what the lane is told.
fn in_lane(core: &mut Core<u32>, lane: Lane) -> (PoolId, std::sync::Arc<std::sync::Mutex<Told>>) {
    let pool = core.pool(1, 1, limits);
    let told = lane.shared.clone();
    core.share_idle(pool, Box::new(lane));
    (pool, told)
}

#[test]
fn a_place_that_a_closed_server_still_has_is_not_given_to_another() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, told) = in_lane(&mut core, Lane::default());
    queue(&mut core, pool, 1, now);
    let (first, _) = open(&mut core, pool, 100, now);
    core.closed(first, false, now);
    told.lock().unwrap().occupied = vec![first.ordinal];
    queue(&mut core, pool, 2, now);
    queue(&mut core, pool, 3, now);
    let (second, _) = open(&mut core, pool, 101, now);
    assert_ne!(second.ordinal, first.ordinal);
    told.lock().unwrap().occupied.clear();
    let (third, _) = open(&mut core, pool, 102, now);
    assert_eq!(third.ordinal, first.ordinal);
}

#[test]
fn an_obsolete_server_is_not_lent_to_a_lane() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, told) = in_lane(&mut core, Lane::default());
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 100, now);
    assert!(core.obsolete(pool).is_empty());
    core.park_linked(id, 100).unwrap();
    assert_eq!(told.lock().unwrap().retired, [id.ordinal], "its next release comes to user space");
}

#[test]
fn a_stale_bit_holds_nobody_up() {
    let mut core = Core::<u32>::default();
    let (pool, _) = in_lane(&mut core, Lane { stale: vec![7], ..Lane::default() });
    assert!(core.take_all_idle(pool).is_empty());
}

#[test]
fn servers_that_a_lane_passes_on_are_retired_when_there_are_too_many() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, told) = in_lane(&mut core, Lane::default());
    (1..=2).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let ids = [100, 101].map(|name| open(&mut core, pool, name, now).0);
    for id in ids {
        core.park_linked(id, 100 + id.ordinal).unwrap();
    }
    core.expire(pool, now);
    assert!(told.lock().unwrap().retired.is_empty());
    core.set_limits(pool, PoolLimits { size: 1, reserve: 0, ..limits() });
    (0..2).for_each(|_| assert!(core.expire(pool, now).is_empty()));
    let retired = told.lock().unwrap().retired.first().copied().expect("one is to come up");
    assert!(told.lock().unwrap().retired.iter().all(|&other| other == retired), "and no other");
    let id = ids[retired as usize];
    let server = core.unpark_linked(id).unwrap();
    assert!(matches!(core.release(id, server, now), Released::Close(_, CloseReason::PoolShrunk)));
}

/// What lets programs keep requests: that no other server will come.
#[test]
fn a_lane_is_told_when_it_has_all_servers_that_there_will_be() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, told) = in_lane(&mut core, Lane::default());
    let full = || told.lock().unwrap().full;
    let of = |size, reserve| PoolLimits { size, reserve, ..limits() };
    core.set_limits(pool, of(1, 1));
    queue(&mut core, pool, 1, now);
    let (first, _) = open(&mut core, pool, 100, now);
    assert_eq!(full(), None, "one more may come of the reserve");
    core.set_limits(pool, of(1, 0));
    assert_eq!(full(), Some(1));
    core.set_limits(pool, of(2, 0));
    assert_eq!(full(), None);
    queue(&mut core, pool, 2, now);
    let (second, _) = open(&mut core, pool, 101, now);
    assert_eq!(full(), Some(2));
    core.set_paused(pool, true);
    assert_eq!(full(), None, "those who wait are user space's to hold");
    core.set_paused(pool, false);
    assert_eq!(full(), Some(2));
    core.closed(second, false, now);
    assert_eq!(full(), None);
    core.set_limits(pool, of(1, 0));
    assert_eq!(full(), Some(1));
    core.set_limits(pool, of(PoolLimits::UNLIMITED, 0));
    assert_eq!(full(), None);
    core.closed(first, false, now);
}

#[test]
fn whoever_looks_for_one_to_grant_has_the_lane_serve_its_own_queue() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, told) = in_lane(&mut core, Lane::default());
    assert!(core.grant_next(pool, now).is_none());
    assert_eq!(told.lock().unwrap().served, 1);
}

#[test]
fn who_waited_gets_a_server_checked_that_rested_for_long() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, limits);
    queue(&mut core, pool, 1, now);
    let (id, _) = open(&mut core, pool, 100, now);
    assert!(matches!(core.release(id, 100, now), Released::Parked));
    core.set_paused(pool, true);
    queue(&mut core, pool, 2, now);
    core.set_paused(pool, false);
    let due = |after| now + Duration::from_secs(after);
    assert!(matches!(core.grant_next(pool, due(31)), Some((_, _, Grant::Server { check: true, .. }))));
}

#[test]
fn without_a_delay_a_server_is_checked_before_each_use_but_its_first() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size: 1, check_delay: Some(Duration::ZERO), ..limits() });
    (1..=2).for_each(|who| {
        queue(&mut core, pool, who, now);
    });
    let (id, granted) = open(&mut core, pool, 100, now);
    assert!(matches!(granted, Released::Grant { check: false, .. }), "{granted:?}");
    let granted = core.release(id, 100, now);
    assert!(matches!(granted, Released::Grant { check: true, .. }), "{granted:?}");
    assert!(matches!(core.release(id, 100, now), Released::Parked));
    assert_eq!(core.counts(pool, now).used, 1);
    assert!(matches!(core.acquire(pool, client(3), None, now), Acquired::Granted { check: true, .. }));
    core.set_limits(pool, PoolLimits { check_delay: None, ..limits() });
    queue(&mut core, pool, 4, now);
    assert!(matches!(core.release(id, 100, now), Released::Grant { check: false, .. }));
}

#[test]
fn who_names_a_removed_pool_does_not_reach_its_successor() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let old = core.pool(1, 1, limits);
    let ticket = queue(&mut core, old, 1, now);
    assert!(!core.remove(old), "somebody waits");
    let (stale, _) = open(&mut core, old, 100, now);
    assert!(!core.remove(old), "it has a connection");
    core.closed(stale, false, now);
    assert!(core.remove(old) && core.remove(old));
    assert_eq!((core.database_connections.len(), core.user_connections.len()), (0, 0));

    let new = core.pool(2, 1, limits);
    assert_eq!((new.index(), core.pools.len()), (old.index(), 1), "the place is used again");
    assert_ne!(new, old);
    let queued = queue(&mut core, new, 2, now);
    let (id, _) = open(&mut core, new, 200, now);
    assert!(matches!(core.release(id, 200, now), Released::Parked));

    // All that a late message may say.
    assert!(matches!(core.launch(old, now), Launch::Not));
    assert!(core.grant_next(old, now).is_none());
    assert!(!core.cancel_wait(old, ticket, client(1)) && !core.cancel_wait(old, queued, client(2)));
    assert!(matches!(core.release(stale, 100, now), Released::Close(100, CloseReason::CloseNeeded)));
    assert!(!core.cancel_begun(stale) && !core.cancel_done(stale) && core.is_close_needed(stale));
    assert!(core.unpark(stale, |_| true).is_none() && core.unpark_claimed(stale).is_none());
    assert_eq!((core.counts(old, now), core.connections(old)), (PoolCounts::default(), 0));
    core.set_paused(old, true);
    core.set_paused(new, false);
    core.set_limits(old, PoolLimits { size_min: 1, ..limits() });
    core.keep_minimum(old, true);
    core.retire(stale);
    assert!(core.obsolete(old).is_empty() && core.take_all_idle(old).is_empty());
    assert!(core.expire(old, now).is_empty() && core.retry(old, now).is_none());
    core.closed(stale, true, now);
    assert!(!core.last_connect_failed(new) && !core.is_paused(new));
    // One who asks anyway gets nothing, and nothing is opened for it.
    queue(&mut core, old, 3, now);
    assert!(matches!(core.launch(old, now), Launch::Not));
    assert!(matches!(core.acquire(new, client(4), None, now), Acquired::Granted { server: 200, .. }));
}

/// User space served the client after all, so nobody waits; the pool grows as if somebody had.
#[test]
fn a_pool_that_programs_find_empty_grows_by_one_at_a_time() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let pool = core.pool(1, 1, || PoolLimits { size: 3, reserve_timeout: Duration::ZERO, ..limits() });
    core.found_none(pool);
    let Launch::Open { id, from_reserve: false } = core.launch(pool, now) else { panic!("none opened") };
    core.found_none(pool);
    assert!(matches!(core.launch(pool, now), Launch::Not), "one is on its way");
    assert!(matches!(core.release(id, 1, now), Released::Parked));
    assert!(matches!(core.launch(pool, now), Launch::Not), "that was then");
    for name in 2..=3 {
        core.found_none(pool);
        open(&mut core, pool, name, now);
    }
    core.found_none(pool);
    assert!(
        matches!(core.launch(pool, now), Launch::Not),
        "pool_size is reached, and nobody waits for the reserve"
    );

    // Not while connections fail, and not at the cost of others.
    let failing = core.pool(2, 1, limits);
    core.found_none(failing);
    let Launch::Open { id, .. } = core.launch(failing, now) else { panic!("none opened") };
    core.closed(id, true, now);
    core.found_none(failing);
    assert!(matches!(core.launch(failing, now), Launch::Not));
    let crowded = || PoolLimits { database_max: 1, ..limits() };
    let (first, second) = (core.pool(3, 1, crowded), core.pool(3, 2, crowded));
    core.found_none(first);
    open(&mut core, first, 10, now);
    core.found_none(second);
    assert!(matches!(core.launch(second, now), Launch::Not), "the other's idle connection is left alone");
    core.set_paused(first, true);
    core.found_none(first);
    assert!(matches!(core.launch(first, now), Launch::Not));
}

/// What came back since the program looked is left to the lane.
#[test]
fn a_client_that_programs_found_no_fit_server_for_gets_an_unfit_one() {
    let (mut core, now) = (Core::<u32>::default(), Instant::now());
    let (pool, _) = in_lane(&mut core, Lane::default());
    for name in [100, 101] {
        queue(&mut core, pool, name, now);
        open(&mut core, pool, name, now);
    }
    let ids: Vec<ServerId> = (0..2).map(|ordinal| ServerId { pool, ordinal, generation: 1 }).collect();
    for (&id, name) in ids.iter().zip([100, 101]) {
        assert!(matches!(core.release(id, name, now), Released::Parked));
    }
    let granted = core.acquire_unlike(pool, client(1), 0, now);
    assert!(
        matches!(granted, Acquired::Granted { server: 101, id, check: false } if id == ids[1]),
        "{granted:?}"
    );
    // All that is left is like it: it gets that.
    let granted = core.acquire_unlike(pool, client(2), 0, now);
    assert!(matches!(granted, Acquired::Granted { server: 100, .. }), "{granted:?}");
    // No more than others does it overtake a queue, or what PAUSE has stopped.
    assert!(matches!(core.acquire_unlike(pool, client(3), 0, now), Acquired::Queued(_)));
    core.set_paused(pool, true);
    assert!(matches!(core.release(ids[1], 101, now), Released::Parked));
    assert!(matches!(core.acquire_unlike(pool, client(4), 0, now), Acquired::Queued(_)));
}
