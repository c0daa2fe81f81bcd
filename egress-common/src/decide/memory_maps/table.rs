//! One map, and the values that it lends.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::vec::Vec;

use super::super::ClaimOutcome;
use crate::abi::Tuple;

/// Lent values, in blocks that never move, each twice as large as the one before.
pub(super) struct Lent<V> {
    blocks: [OnceCell<Vec<OnceCell<V>>>; 26],
    count: Cell<usize>,
}

impl<V> Lent<V> {
    const FIRST_BITS: u32 = 6;

    pub(super) const fn new() -> Self {
        Self { blocks: [const { OnceCell::new() }; 26], count: Cell::new(0) }
    }

    pub(super) fn lend(&self, value: V) -> &V {
        let index = self.count.get() + (1 << Self::FIRST_BITS);
        self.count.set(self.count.get() + 1);
        let bits = index.ilog2();
        let block = self.blocks[(bits - Self::FIRST_BITS) as usize]
            .get_or_init(|| (0..1usize << bits).map(|_| OnceCell::new()).collect());
        block[index - (1 << bits)].get_or_init(|| value)
    }

    pub(super) fn take_back(&mut self) {
        let mut left = self.count.replace(0);
        for block in &mut self.blocks {
            let Some(cells) = block.get_mut().filter(|_| left > 0) else { return };
            let used = left.min(cells.len());
            cells[..used].iter_mut().for_each(|cell| drop(cell.take()));
            left -= used;
        }
    }
}

/// A map of tuples with a size limit.
#[derive(Debug)]
pub struct Table<V> {
    entries: RefCell<HashMap<Tuple, V>>,
    limit: Cell<usize>,
}

impl<V: Copy> Table<V> {
    pub(super) fn new() -> Self {
        Self { entries: RefCell::default(), limit: Cell::new(usize::MAX) }
    }

    /// Sets the maximum number of entries.
    pub fn limit(&self, limit: usize) {
        self.limit.set(limit);
    }

    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, key: &Tuple) -> Option<V> {
        self.entries.borrow().get(key).copied()
    }

    pub fn put(&self, key: Tuple, value: V) {
        self.entries.borrow_mut().insert(key, value);
    }

    pub fn remove(&self, key: &Tuple) -> Option<V> {
        self.entries.borrow_mut().remove(key)
    }

    pub fn clear(&self) {
        self.entries.borrow_mut().clear();
    }

    pub fn all(&self) -> Vec<(Tuple, V)> {
        self.entries.borrow().iter().map(|(key, value)| (*key, *value)).collect()
    }

    /// Changes an entry; `None` where there is none.
    pub fn change(&self, key: &Tuple, change: impl FnOnce(&mut V)) -> Option<V> {
        let mut entries = self.entries.borrow_mut();
        let value = entries.get_mut(key)?;
        change(value);
        Some(*value)
    }

    pub fn change_all(&self, change: impl FnMut(&mut V)) {
        self.entries.borrow_mut().values_mut().for_each(change);
    }

    pub fn retain(&self, mut keep: impl FnMut(&Tuple, &V) -> bool) {
        self.entries.borrow_mut().retain(|key, value| keep(key, value));
    }

    pub(super) fn claim(&self, key: &Tuple, value: V) -> ClaimOutcome {
        let mut entries = self.entries.borrow_mut();
        if entries.contains_key(key) {
            return ClaimOutcome::Taken;
        }
        if entries.len() >= self.limit.get() {
            return ClaimOutcome::Full;
        }
        entries.insert(*key, value);
        ClaimOutcome::Claimed
    }
}
