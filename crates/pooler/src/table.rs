// SPDX-License-Identifier: Apache-2.0
//! A table with stable small indices and generations: an index that outlived its entry finds nothing.

/// Generations use the bits that an epoll token has left.
const GENERATION_MASK: u32 = 0x00ff_ffff;

/// Index and generation of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub index: u32,
    pub generation: u32,
}

#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    pub fn insert(&mut self, make: impl FnOnce(Key) -> T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let (generation, slot) = &mut self.entries[index as usize];
        *generation = (*generation + 1) & GENERATION_MASK;
        let key = Key { index, generation: *generation };
        *slot = Some(make(key));
        key
    }

    pub fn get(&self, key: Key) -> Option<&T> {
        match self.entries.get(key.index as usize) {
            Some((generation, Some(entry))) if *generation == key.generation => Some(entry),
            _ => None,
        }
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        match self.entries.get_mut(key.index as usize) {
            Some((generation, Some(entry))) if *generation == key.generation => Some(entry),
            _ => None,
        }
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        match self.entries.get_mut(key.index as usize) {
            Some((generation, slot)) if *generation == key.generation => {
                let taken = slot.take();
                if taken.is_some() {
                    self.free.push(key.index);
                }
                taken
            }
            _ => None,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, (generation, slot))| {
            slot.as_ref().map(|entry| (Key { index: index as u32, generation: *generation }, entry))
        })
    }

    pub fn keys(&self) -> Vec<Key> {
        self.iter().map(|(key, _)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut table = Table::default();
        let first = table.insert(|_| 'a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert(|_| 'b');
        assert_eq!(first.index, second.index);
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        assert_eq!(table.remove(first), None);
    }
}
