//! Why pages of a region could not be had: each map is told once.

use crate::error::Error;
use crate::sync::Mutex;
use std::io;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct FaultErrors {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    count: u64,
    last: Option<Arc<Error>>,
}

impl FaultErrors {
    /// A page cannot be had, if `poison` sees to it that nobody touches it unharmed: whoever meets
    /// that is told. Whether it did.
    pub(crate) fn record_if(
        &self,
        error: Arc<Error>,
        poison: impl FnOnce() -> io::Result<bool>,
    ) -> io::Result<bool> {
        let mut state = self.state.lock();
        let is_poisoned = poison()?;
        if is_poisoned {
            log::error!("a page of a map cannot be had: {error}");
            state.count += 1;
            state.last = Some(error);
        }
        Ok(is_poisoned)
    }

    /// How many there were.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().count
    }

    /// The last one, if there were any since `seen`; how many there are now goes there.
    pub(crate) fn since(&self, seen: &mut u64) -> Option<Arc<Error>> {
        let state = self.state.lock();
        let is_new = state.count > *seen;
        *seen = state.count;
        state.last.clone().filter(|_| is_new)
    }
}
