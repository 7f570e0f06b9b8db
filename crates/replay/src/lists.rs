// SPDX-License-Identifier: Apache-2.0
//! Lists of which millions are alike: each is kept once, and known by a number of four bytes.

use std::hash::Hash;
use std::sync::Arc;

use foldhash::HashMap;

/// The number of a list. The default is the empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListId(u32);

/// See the head of this module.
#[derive(Clone, Debug)]
pub struct Lists<T> {
    /// List `n` is at `n - 1`; 0 is the empty one.
    all: Vec<Arc<[T]>>,
    ids: HashMap<Arc<[T]>, ListId>,
}

impl<T> Default for Lists<T> {
    fn default() -> Self {
        Self { all: Vec::new(), ids: HashMap::default() }
    }
}

impl<T: Clone + Eq + Hash> Lists<T> {
    /// The number of a list with these contents.
    pub fn add(&mut self, list: &[T]) -> ListId {
        if list.is_empty() {
            return ListId::default();
        }
        if let Some(&id) = self.ids.get(list) {
            return id;
        }
        let list: Arc<[T]> = list.into();
        self.all.push(Arc::clone(&list));
        let id = ListId(self.all.len() as u32);
        self.ids.insert(list, id);
        id
    }
}

impl<T> Lists<T> {
    /// What a number stands for. Panics on one that these lists never gave.
    pub fn get(&self, id: ListId) -> &[T] {
        match id.0 {
            0 => &[],
            number => &self.all[number as usize - 1],
        }
    }

    /// How many different ones there are, the empty one not counted.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none but the empty one.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lists_are_one() {
        let mut lists = Lists::default();
        let (one, two) = (lists.add(&[1, 2]), lists.add(&[2]));
        assert_eq!((lists.add(&[1, 2]), lists.add(&[])), (one, ListId::default()));
        assert_eq!(
            (lists.get(one), lists.get(two), lists.get(ListId::default())),
            (&[1, 2][..], &[2][..], &[][..])
        );
        assert_eq!(lists.len(), 2);
    }
}
