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

/// Entries of one chunk.
const CHUNK: usize = 128;

/// In chunks, because one growing array would hold up to twice of what is needed, and three times while it moves: with
/// ten thousand clients that is most of the memory that they cost.
#[derive(Debug)]
pub(crate) struct Table<T> {
    chunks: Vec<Vec<(u32, Option<T>)>>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    pub fn insert(&mut self, make: impl FnOnce(Key) -> T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| self.grow());
        let (generation, slot) = &mut self.chunks[index as usize / CHUNK][index as usize % CHUNK];
        *generation = (*generation + 1) & GENERATION_MASK;
        let key = Key { index, generation: *generation };
        *slot = Some(make(key));
        key
    }

    /// Adds an empty entry.
    fn grow(&mut self) -> u32 {
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let full = (self.chunks.len() - 1) * CHUNK;
        let Some(last) = self.chunks.last_mut() else { unreachable!("one was just added") };
        last.push((0, None));
        (full + last.len() - 1) as u32
    }

    pub fn get(&self, key: Key) -> Option<&T> {
        let index = key.index as usize;
        match self.chunks.get(index / CHUNK)?.get(index % CHUNK)? {
            (generation, Some(entry)) if *generation == key.generation => Some(entry),
            _ => None,
        }
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let index = key.index as usize;
        match self.chunks.get_mut(index / CHUNK)?.get_mut(index % CHUNK)? {
            (generation, Some(entry)) if *generation == key.generation => Some(entry),
            _ => None,
        }
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        let index = key.index as usize;
        match self.chunks.get_mut(index / CHUNK)?.get_mut(index % CHUNK)? {
            (generation, slot) if *generation == key.generation => {
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
        self.chunks.iter().flatten().enumerate().filter_map(|(index, (generation, slot))| {
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
