//! Weak references to things that come and go, the oldest first.
//!
//! An entry that goes need not be taken off: a reference to one that is gone is met and dropped, or
//! dropped when the list has doubled since that was last done. So the list is never longer than
//! twice what is alive, and a few more; and what it costs to put something on it does not grow with
//! its length, taken over many. (Until it is dropped, a weak reference keeps the memory of what it
//! led to from being used again.)

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// Below this length nothing is looked at.
const LENGTH_MIN: usize = 32;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct WeakList<T: ?Sized> {
    entries: VecDeque<Weak<T>>,
    /// The length at which those that lead to nothing are looked for.
    looks_at: usize,
    /// Entries that were looked at for that.
    #[cfg(test)]
    looks: usize,
}

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            looks_at: LENGTH_MIN,
            #[cfg(test)]
            looks: 0,
        }
    }
}

impl<T: ?Sized> WeakList<T> {
    /// Puts something at the end; whether what is gone was forgotten.
    pub(crate) fn push(&mut self, entry: Weak<T>) -> bool {
        let looks = self.entries.len() >= self.looks_at;
        if looks {
            #[cfg(test)]
            {
                self.looks += self.entries.len();
            }
            self.entries.retain(|entry| entry.strong_count() > 0);
            self.looks_at = (2 * self.entries.len()).max(LENGTH_MIN);
        }
        self.entries.push_back(entry);
        looks
    }

    /// Takes the first one off that is not gone.
    pub(crate) fn pop(&mut self) -> Option<Arc<T>> {
        loop {
            if let Some(entry) = self.entries.pop_front()?.upgrade() {
                return Some(entry);
            }
        }
    }

    /// How many entries there are, with those that lead to nothing.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The last one that is not gone.
    pub(crate) fn last(&self) -> Option<Arc<T>> {
        self.entries.iter().rev().find_map(Weak::upgrade)
    }

    /// Those that are alive, one after the other: only the one that is at hand is kept so. The list
    /// may be changed meanwhile.
    pub(crate) fn snapshot(&self) -> impl Iterator<Item = Arc<T>> + use<T> {
        let entries = self.entries.clone();
        entries.into_iter().filter_map(|entry| entry.upgrade())
    }

    /// Whether nothing on the list is alive.
    pub(crate) fn are_all_gone(&self) -> bool {
        self.entries.iter().all(|entry| entry.strong_count() == 0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn dropped_entries_are_forgotten_at_a_constant_cost() {
        let mut list = WeakList::default();
        let (mut kept, mut pushed) = (Vec::new(), 0);
        for number in 0..20_000_usize {
            let entry = Arc::new(number);
            list.push(Arc::downgrade(&entry));
            pushed += 1;
            // One in four stays; of the last quarter all.
            if number % 4 == 0 || number >= 15_000 {
                kept.push(entry);
            }
            assert!(list.len() <= 2 * kept.len() + LENGTH_MIN + 1, "{number}");
            assert!(list.looks <= 4 * pushed, "{} looks for {pushed}", list.looks);
        }
        let met: Vec<_> = list.snapshot().map(|entry| *entry).collect();
        assert_eq!(met, kept.iter().map(|entry| **entry).collect::<Vec<_>>());
        kept.drain(..1000);
        assert_eq!(*list.pop().unwrap(), *kept[0]);
        kept.clear();
        assert!(list.are_all_gone() && list.pop().is_none());
    }
}
