//! A list of weak references to objects that come and go, oldest first.
//!
//! The entry of a dropped object is discarded when it is found, or when the list has doubled in
//! length since the last purge: the length is at most about twice the number of live objects, and
//! the amortized cost of a push is constant.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

const LENGTH_MIN: usize = 32;

#[derive(Debug)]
pub(crate) struct WeakList<T: ?Sized> {
    entries: VecDeque<Weak<T>>,
    purge_length: usize,
    #[cfg(test)]
    examined: usize,
}

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            purge_length: LENGTH_MIN,
            #[cfg(test)]
            examined: 0,
        }
    }
}

impl<T: ?Sized> WeakList<T> {
    /// Appends an entry. Returns `true` if dropped entries were purged.
    pub(crate) fn push(&mut self, entry: Weak<T>) -> bool {
        let is_purge = self.entries.len() >= self.purge_length;
        if is_purge {
            #[cfg(test)]
            {
                self.examined += self.entries.len();
            }
            self.entries.retain(|entry| entry.strong_count() > 0);
            self.purge_length = (2 * self.entries.len()).max(LENGTH_MIN);
        }
        self.entries.push_back(entry);
        is_purge
    }

    pub(crate) fn pop(&mut self) -> Option<Arc<T>> {
        loop {
            if let Some(entry) = self.entries.pop_front()?.upgrade() {
                return Some(entry);
            }
        }
    }

    /// Removes the live entries for which `keep` returns `false`, and all dropped ones. `keep` is
    /// called in order.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&Weak<T>) -> bool) {
        self.entries.retain(|entry| entry.strong_count() > 0 && keep(entry));
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn last(&self) -> Option<Arc<T>> {
        self.entries.iter().rev().find_map(Weak::upgrade)
    }

    /// Iterates over the live entries of a copy of the list, upgrading one at a time. The list may
    /// change meanwhile.
    pub(crate) fn snapshot(&self) -> impl Iterator<Item = Arc<T>> + use<T> {
        let entries = self.entries.clone();
        entries.into_iter().filter_map(|entry| entry.upgrade())
    }

    pub(crate) fn are_all_dropped(&self) -> bool {
        self.entries.iter().all(|entry| entry.strong_count() == 0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn dropped_entries_are_purged_at_a_constant_amortized_cost() {
        let mut list = WeakList::default();
        let (mut kept, mut pushed) = (Vec::new(), 0);
        for number in 0..20_000_usize {
            let entry = Arc::new(number);
            list.push(Arc::downgrade(&entry));
            pushed += 1;
            // One in four stays alive; of the last quarter, all.
            if number % 4 == 0 || number >= 15_000 {
                kept.push(entry);
            }
            assert!(list.len() <= 2 * kept.len() + LENGTH_MIN + 1, "{number}");
            assert!(
                list.examined <= 4 * pushed,
                "{} entries examined for {pushed} pushes",
                list.examined
            );
        }
        let met: Vec<_> = list.snapshot().map(|entry| *entry).collect();
        assert_eq!(met, kept.iter().map(|entry| **entry).collect::<Vec<_>>());
        kept.drain(..1000);
        assert_eq!(*list.pop().unwrap(), *kept[0]);
        kept.clear();
        assert!(list.are_all_dropped() && list.pop().is_none());
    }
}
