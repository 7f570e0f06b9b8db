// SPDX-License-Identifier: Apache-2.0
//! Host names to addresses, on a thread of its own, with a cache of `dns_max_ttl`.
//!
//! The system's resolver is asked (`getaddrinfo`), so that /etc/hosts, nsswitch and search domains mean what they mean everywhere
//! else. It does not tell time-to-live, so `dns_max_ttl` is the time after which a name is asked again, when the next connection to it is
//! opened. Connections to an address that the name has no more are obsolete from then on, as with PgBouncer.

use std::collections::HashMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::shared::lock;

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

/// The resolver.
pub(crate) struct Resolver {
    cache: Arc<Mutex<HashMap<String, Entry>>>,
    questions: Mutex<Sender<(String, Asker)>>,
    /// Names that have lost an address, since [`Resolver::take_moved`] was asked last.
    moved: Arc<Mutex<Vec<String>>>,
}

impl Resolver {
    pub fn start() -> std::io::Result<Self> {
        Self::asking(ask)
    }

    fn asking(ask: impl Fn(&str) -> Answer + Send + 'static) -> std::io::Result<Self> {
        let (questions, incoming) = channel::<(String, Asker)>();
        let cache: Arc<Mutex<HashMap<String, Entry>>> = Arc::default();
        let moved: Arc<Mutex<Vec<String>>> = Arc::default();
        let (shared, told) = (cache.clone(), moved.clone());
        std::thread::Builder::new().name("resolver".into()).spawn(move || {
            for (name, asker) in incoming {
                let answer = ask(&name);
                let before =
                    lock(&shared).get(&name).map(|entry| entry.addresses.clone()).unwrap_or_default();
                let addresses = answer.clone().unwrap_or_else(|_| before.clone());
                let has_moved = before.iter().any(|address| !addresses.contains(address));
                let entry = Entry { answer: answer.clone(), addresses, asked_at: Instant::now() };
                lock(&shared).insert(name.clone(), entry);
                if has_moved {
                    lock(&told).push(name);
                }
                asker(answer);
            }
        })?;
        Ok(Self { cache, questions: Mutex::new(questions), moved })
    }

    /// The addresses of `name`, if they are known and fresh.
    pub fn cached(&self, name: &str, max_age: Duration, max_age_failed: Duration) -> Option<Answer> {
        if let Ok(address) = name.parse::<IpAddr>() {
            return Some(Ok([address].into()));
        }
        let cache = lock(&self.cache);
        let entry = cache.get(name)?;
        let max_age = if entry.answer.is_ok() { max_age } else { max_age_failed };
        (entry.asked_at.elapsed() < max_age).then(|| entry.answer.clone())
    }

    /// The addresses of `name` that were found last, however long ago.
    pub fn last_known(&self, name: &str) -> Arc<[IpAddr]> {
        lock(&self.cache).get(name).map(|entry| entry.addresses.clone()).unwrap_or_default()
    }

    /// Asks; `then` runs on the resolver's thread and must only pass the answer on.
    pub fn resolve(&self, name: String, then: impl FnOnce(Answer) + Send + 'static) {
        if let Err(refused) = lock(&self.questions).send((name, Box::new(then))) {
            refused.0.1(Err("the resolver has ended".into()));
        }
    }

    /// The names that have lost an address since this was asked last. One that cannot be resolved any more has lost none: what is
    /// connected stays.
    pub fn take_moved(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.moved))
    }

    /// All names asked so far, for `SHOW DNS_HOSTS`.
    pub fn entries(&self) -> Vec<(String, Entry)> {
        let mut all: Vec<_> =
            lock(&self.cache).iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_name_that_loses_an_address_has_moved_and_one_that_fails_has_not() {
        let answers: [Answer; 6] = ["1 2", "2 1", "1 2 3", "", "1 3", "1 3"].map(|hosts| {
            let addresses: Arc<[IpAddr]> =
                hosts.split_whitespace().map(|host| format!("10.0.0.{host}").parse().unwrap()).collect();
            if addresses.is_empty() { Err("no such host".into()) } else { Ok(addresses) }
        });
        let asked = AtomicUsize::new(0);
        let resolver =
            Resolver::asking(move |_| answers[asked.fetch_add(1, Ordering::Relaxed)].clone()).unwrap();
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
}
