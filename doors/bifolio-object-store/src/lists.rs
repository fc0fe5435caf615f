//! Lists that were requested to be remembered, for a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::ListResult;
use object_store::path::Path;

use super::object::{Began, Known};
use super::object_store;

/// Objects and prefixes in all remembered lists; a longer list is not remembered.
const ENTRIES_MAX: usize = 8192;

/// Identifies a list: its prefix, and `true` if it ends at delimiters.
pub(crate) type ListKey = (Option<Path>, bool);

/// Lists, each with the time when its request began.
#[derive(Debug)]
pub(crate) struct Lists {
    age: Option<Duration>,
    lists: Mutex<HashMap<ListKey, (Began, Arc<ListResult>)>>,
}

impl Lists {
    pub(crate) fn new(age: Option<Duration>) -> Self {
        Self { age, lists: Mutex::default() }
    }

    /// Returns a list if it is young enough, and nothing was changed through this store since.
    pub(crate) fn get(&self, key: &ListKey, known: &Known) -> Option<Arc<ListResult>> {
        let age = self.age?;
        let lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, list) = lists.get(key)?;
        (began.at.elapsed() < age && known.is_unchanged(began)).then(|| Arc::clone(list))
    }

    /// Returns `true` if lists of this length are remembered.
    pub(crate) fn takes(&self, length: usize) -> bool {
        self.age.is_some() && length <= ENTRIES_MAX
    }

    pub(crate) fn put(&self, key: ListKey, began: Began, list: ListResult) {
        if !self.takes(length(&list)) {
            return;
        }
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        lists.remove(&key);
        let entries: usize = lists.values().map(|(_, list)| length(list)).sum();
        if entries + length(&list) > ENTRIES_MAX {
            lists.clear();
        }
        lists.insert(key, (began, Arc::new(list)));
    }
}

/// Returns what a list counts for; an empty one counts, too.
fn length(list: &ListResult) -> usize {
    list.objects.len() + list.common_prefixes.len() + 1
}
