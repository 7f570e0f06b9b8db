// SPDX-License-Identifier: Apache-2.0
//! Host names to addresses, on threads of its own, with a cache of `dns_max_ttl`.
//!
//! The system's resolver is asked (`getaddrinfo`), so that /etc/hosts, nsswitch and search domains mean what they mean everywhere
//! else. It does not tell time-to-live, so `dns_max_ttl` is the time after which a name is asked again, when the next connection to it is
//! opened. Connections to an address that the name has no more are obsolete from then on, as with PgBouncer.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::shared::lock;

/// Names that are asked at a time. The others wait.
const THREADS_MAX: usize = 16;

/// Environment variable for tests only: `UNDERPASS_TEST_HOSTS="NAME ADDRESS ...;NAME ..."` answers for these names. One without an address
/// has a silent name server.
const HOSTS_VARIABLE: &str = "UNDERPASS_TEST_HOSTS";

/// Addresses of a name, or why there are none.
pub(crate) type Answer = Result<Arc<[IpAddr]>, Arc<str>>;

/// What is known of a name.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub answer: Answer,
    /// Of the last answer that had any.
    pub addresses: Arc<[IpAddr]>,
    pub asked_at: Instant,
}

type Asker = Box<dyn FnOnce(Answer) + Send>;

/// Names under way.
#[derive(Default)]
struct Questions {
    /// Who wants to know, by name.
    askers: HashMap<String, Vec<Asker>>,
    /// Names that no thread has taken up yet.
    waiting: VecDeque<String>,
    threads: usize,
}

/// The resolver.
pub(crate) struct Resolver {
    inner: Arc<Inner>,
}

struct Inner {
    ask: Box<dyn Fn(&str) -> Answer + Send + Sync>,
    cache: Mutex<HashMap<String, Entry>>,
    questions: Mutex<Questions>,
    /// Names that have lost an address, since [`Resolver::take_moved`] was asked last.
    moved: Mutex<Vec<String>>,
}

impl Inner {
    /// Asks for one name after the other, until none waits.
    fn answer_all(&self, mut name: String) {
        loop {
            self.answer(&name);
            let mut questions = lock(&self.questions);
            match questions.waiting.pop_front() {
                Some(next) => name = next,
                None => {
                    questions.threads -= 1;
                    return;
                }
            }
        }
    }

    fn answer(&self, name: &str) {
        let answer = (self.ask)(name);
        let has_moved = {
            let mut cache = lock(&self.cache);
            let before = cache.get(name).map(|entry| entry.addresses.clone()).unwrap_or_default();
            let addresses = answer.clone().unwrap_or_else(|_| before.clone());
            let has_moved = before.iter().any(|address| !addresses.contains(address));
            let entry = Entry { answer: answer.clone(), addresses, asked_at: Instant::now() };
            cache.insert(name.to_owned(), entry);
            has_moved
        };
        if has_moved {
            lock(&self.moved).push(name.to_owned());
        }
        self.tell(name, &answer);
    }

    fn tell(&self, name: &str, answer: &Answer) {
        let askers = lock(&self.questions).askers.remove(name).unwrap_or_default();
        askers.into_iter().for_each(|asker| asker(answer.clone()));
    }
}

impl Resolver {
    pub fn start() -> Self {
        match std::env::var(HOSTS_VARIABLE) {
            Ok(hosts) => Self::asking(move |name| ask_table(&hosts, name)),
            Err(_) => Self::asking(ask),
        }
    }

    fn asking(ask: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Self {
        let inner = Inner {
            ask: Box::new(ask),
            cache: Mutex::default(),
            questions: Mutex::default(),
            moved: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The addresses of `name`, if they are known and fresh.
    pub fn cached(&self, name: &str, max_age: Duration, max_age_failed: Duration) -> Option<Answer> {
        if let Ok(address) = name.parse::<IpAddr>() {
            return Some(Ok([address].into()));
        }
        let cache = lock(&self.inner.cache);
        let entry = cache.get(name)?;
        let max_age = if entry.answer.is_ok() { max_age } else { max_age_failed };
        (entry.asked_at.elapsed() < max_age).then(|| entry.answer.clone())
    }

    /// The addresses of `name` that were found last, however long ago.
    pub fn last_known(&self, name: &str) -> Arc<[IpAddr]> {
        lock(&self.inner.cache).get(name).map(|entry| entry.addresses.clone()).unwrap_or_default()
    }

    /// Asks; `then` runs on a thread of the resolver's and must only pass the answer on. A name that is under way already is not asked twice, and one
    /// whose name server is silent keeps no other waiting.
    pub fn resolve(&self, name: String, then: impl FnOnce(Answer) + Send + 'static) {
        {
            let mut questions = lock(&self.inner.questions);
            let is_under_way = questions.askers.contains_key(&name);
            questions.askers.entry(name.clone()).or_default().push(Box::new(then));
            if is_under_way {
                return;
            }
            if questions.threads == THREADS_MAX {
                return questions.waiting.push_back(name);
            }
            questions.threads += 1;
        }
        let (inner, asked) = (self.inner.clone(), name.clone());
        let thread = std::thread::Builder::new().name("resolver".into());
        if let Err(error) = thread.spawn(move || inner.answer_all(asked)) {
            lock(&self.inner.questions).threads -= 1;
            self.inner.tell(&name, &Err(format!("no thread for the resolver: {error}").into()));
        }
    }

    /// The names that have lost an address since this was asked last. One that cannot be resolved any more has lost none: what is
    /// connected stays.
    pub fn take_moved(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.inner.moved))
    }

    /// All names asked so far, for `SHOW DNS_HOSTS`.
    pub fn entries(&self) -> Vec<(String, Entry)> {
        let mut all: Vec<_> =
            lock(&self.inner.cache).iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

fn ask(name: &str) -> Answer {
    match (name, 0).to_socket_addrs() {
        Ok(found) => {
            let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
            addresses.dedup();
            if addresses.is_empty() { Err("no address".into()) } else { Ok(addresses.into()) }
        }
        Err(error) => Err(error.to_string().into()),
    }
}

/// See [`HOSTS_VARIABLE`].
fn ask_table(hosts: &str, name: &str) -> Answer {
    let line = hosts.split(';').find_map(|line| {
        let (known, addresses) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        (known == name).then_some(addresses)
    });
    let Some(line) = line else { return ask(name) };
    let addresses: Vec<IpAddr> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    while addresses.is_empty() {
        std::thread::park();
    }
    Ok(addresses.into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_name_that_loses_an_address_has_moved_and_one_that_fails_has_not() {
        let answers: [Answer; 6] = ["1 2", "2 1", "1 2 3", "", "1 3", "1 3"].map(|hosts| {
            let addresses: Arc<[IpAddr]> =
                hosts.split_whitespace().map(|host| format!("10.0.0.{host}").parse().unwrap()).collect();
            if addresses.is_empty() { Err("no such host".into()) } else { Ok(addresses) }
        });
        let asked = AtomicUsize::new(0);
        let resolver = Resolver::asking(move |_| answers[asked.fetch_add(1, Ordering::Relaxed)].clone());
        let ask = || {
            let (tell, told) = channel();
            resolver.resolve("db".into(), move |answer| tell.send(answer.is_ok()).unwrap());
            (told.recv().unwrap(), resolver.take_moved())
        };
        assert_eq!(ask(), (true, vec![]));
        assert_eq!(ask(), (true, vec![]), "another order");
        assert_eq!(ask(), (true, vec![]), "one more");
        assert_eq!(ask(), (false, vec![]));
        assert_eq!(ask(), (true, vec!["db".to_owned()]), "it has lost 10.0.0.2");
        assert_eq!(ask(), (true, vec![]));
    }

    #[test]
    fn a_name_without_an_answer_keeps_no_other_waiting_and_is_asked_once() {
        let (answers, silent) = channel::<Answer>();
        let silent = Mutex::new(silent);
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let resolver = Resolver::asking(move |name| {
            if name != "silent" {
                return Err("none".into());
            }
            counted.fetch_add(1, Ordering::Relaxed);
            lock(&silent).recv().unwrap()
        });
        let (tell, told) = channel();
        let ask = |name: &'static str| {
            let tell = tell.clone();
            resolver.resolve(name.into(), move |answer| tell.send((name, answer.is_ok())).unwrap());
        };
        ask("silent");
        ask("silent");
        (0..2 * THREADS_MAX).for_each(|_| ask("other"));
        (0..2 * THREADS_MAX).for_each(|_| assert_eq!(told.recv().unwrap(), ("other", false)));
        answers.send(Ok([IpAddr::from([10, 0, 0, 1])].into())).unwrap();
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], [("silent", true); 2]);
        assert_eq!(asked.load(Ordering::Relaxed), 1, "both were told at once");
    }

    #[test]
    fn a_failure_is_as_old_as_its_own_limit_allows() {
        let resolver = Resolver::asking(|name| {
            if name == "none" { Err("no such host".into()) } else { Ok([IpAddr::from([10, 0, 0, 1])].into()) }
        });
        let (hour, none) = (Duration::from_secs(3600), Duration::ZERO);
        for name in ["db", "none"] {
            assert!(resolver.cached(name, hour, hour).is_none(), "{name}: not asked yet");
            let (tell, told) = channel();
            resolver.resolve(name.into(), move |_| tell.send(()).unwrap());
            told.recv().unwrap();
        }
        assert!(matches!(resolver.cached("db", hour, none), Some(Ok(_))));
        assert!(resolver.cached("db", none, hour).is_none());
        assert!(matches!(resolver.cached("none", none, hour), Some(Err(_))));
        assert!(resolver.cached("none", hour, none).is_none());
        let address = resolver.cached("10.0.0.2", none, none);
        assert!(matches!(address, Some(Ok(_))), "never asked: {address:?}");
    }
}
