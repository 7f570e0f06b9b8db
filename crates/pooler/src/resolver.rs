// SPDX-License-Identifier: Apache-2.0
//! Host names to addresses, on a thread of its own, with a cache of `dns_max_ttl`.
//!
//! The system's resolver is asked (`getaddrinfo`), so that /etc/hosts, nsswitch and search domains mean what they mean everywhere
//! else. It does not tell time-to-live, so `dns_max_ttl` is the time after which a name is asked again.

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
    pub asked_at: Instant,
}

type Asker = Box<dyn FnOnce(Answer) + Send>;

/// The resolver.
pub(crate) struct Resolver {
    cache: Arc<Mutex<HashMap<String, Entry>>>,
    questions: Mutex<Sender<(String, Asker)>>,
}

impl Resolver {
    pub fn start() -> std::io::Result<Self> {
        let (questions, incoming) = channel::<(String, Asker)>();
        let cache: Arc<Mutex<HashMap<String, Entry>>> = Arc::default();
        let shared = cache.clone();
        std::thread::Builder::new().name("resolver".into()).spawn(move || {
            for (name, asker) in incoming {
                let answer = ask(&name);
                lock(&shared).insert(name, Entry { answer: answer.clone(), asked_at: Instant::now() });
                asker(answer);
            }
        })?;
        Ok(Self { cache, questions: Mutex::new(questions) })
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

    /// Asks; `then` runs on the resolver's thread and must only pass the answer on.
    pub fn resolve(&self, name: String, then: impl FnOnce(Answer) + Send + 'static) {
        if let Err(refused) = lock(&self.questions).send((name, Box::new(then))) {
            refused.0.1(Err("the resolver has ended".into()));
        }
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
