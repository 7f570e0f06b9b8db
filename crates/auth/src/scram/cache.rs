// SPDX-License-Identifier: Apache-2.0
//! A bounded cache of derived keys: PBKDF2 is by far the dearest part of a login.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::{KEY_LEN, ScramKeys, hmac};

/// Keys by (password, salt, iterations), in two generations: when the young one is full it becomes the old
/// one, and the old one is dropped. What is used moves to the young one. So every operation is O(1) and at
/// most `2 * half` entries live.
pub(crate) struct KeyCache {
    /// Names of entries are HMACs under this key: the table holds no password.
    name_key: [u8; KEY_LEN],
    half: usize,
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    young: HashMap<[u8; KEY_LEN], ScramKeys>,
    old: HashMap<[u8; KEY_LEN], ScramKeys>,
}

impl KeyCache {
    /// `capacity` in entries of about 150 bytes; 0 keeps nothing.
    pub(crate) fn new(name_key: [u8; KEY_LEN], capacity: usize) -> Self {
        Self { name_key, half: capacity.div_ceil(2), generations: Mutex::default() }
    }

    pub(crate) fn get(&self, password: &[u8], salt: &[u8], iterations: u32) -> Option<ScramKeys> {
        let name = self.name(password, salt, iterations);
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keys) = generations.young.get(&name) {
            return Some(keys.clone());
        }
        let keys = generations.old.remove(&name)?;
        generations.insert(name, keys.clone(), self.half);
        Some(keys)
    }

    pub(crate) fn insert(&self, password: &[u8], keys: ScramKeys) {
        let name = self.name(password, &keys.salt, keys.iterations);
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.insert(name, keys, self.half);
    }

    fn name(&self, password: &[u8], salt: &[u8], iterations: u32) -> [u8; KEY_LEN] {
        let length = (salt.len() as u64).to_be_bytes();
        hmac(&self.name_key, &[&iterations.to_be_bytes(), &length, salt, password])
    }
}

impl Generations {
    fn insert(&mut self, name: [u8; KEY_LEN], keys: ScramKeys, half: usize) {
        if half == 0 {
            return;
        }
        if self.young.len() >= half && !self.young.contains_key(&name) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(name, keys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(salt: u32) -> ScramKeys {
        ScramKeys {
            client_key: [1; 32],
            server_key: [2; 32],
            salt: salt.to_be_bytes().to_vec(),
            iterations: 1,
        }
    }

    #[test]
    fn stays_bounded_and_keeps_what_is_used() {
        let cache = KeyCache::new([7; 32], 10);
        cache.insert(b"pw", keys(0));
        for salt in 1..1000 {
            cache.insert(b"pw", keys(salt));
            assert!(cache.get(b"pw", &0u32.to_be_bytes(), 1).is_some(), "{salt}");
        }
        let generations = cache.generations.lock().unwrap();
        assert!(generations.young.len() + generations.old.len() <= 10);
    }

    #[test]
    fn names_do_not_run_together() {
        let cache = KeyCache::new([7; 32], 10);
        cache.insert(b"pw", keys(0));
        assert!(cache.get(b"pw", &[0, 0, 0], 1).is_none());
        assert!(cache.get(b"\0pw", &[0, 0, 0], 1).is_none());
        assert!(cache.get(b"pw", &[0; 4], 2).is_none());
        assert!(cache.get(b"other", &[0; 4], 1).is_none());
        let none = KeyCache::new([7; 32], 0);
        none.insert(b"pw", keys(0));
        assert!(none.get(b"pw", &[0; 4], 1).is_none());
    }
}
