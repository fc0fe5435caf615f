//! Tells tantivy of commits: a thread that compares the identity of `meta.json` with the last one.
//!
//! The thread is started by the first subscription and ends after the directory. A commit of this
//! process wakes it; a commit of another one is found by looking from time to time.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, fs, io, thread};

use tantivy::directory::{WatchCallback, WatchCallbackList, WatchHandle};

/// Upper bound on the delay of a commit of another process.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The directory's end of the thread.
#[derive(Debug)]
pub(crate) struct Watcher(Arc<Shared>);

struct Shared {
    meta_path: PathBuf,
    callbacks: WatchCallbackList,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_started: bool,
    /// Set when the file was replaced and the thread has not looked yet.
    must_look: bool,
    must_end: bool,
}

/// Inode, size and time of the last change of a file.
type Identity = (u64, u64, i64, i64);

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Watch").field("path", &self.meta_path).finish_non_exhaustive()
    }
}

impl Watcher {
    /// Makes a watcher without a thread.
    pub(crate) fn new(meta_path: PathBuf) -> Self {
        let callbacks = WatchCallbackList::default();
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { meta_path, callbacks, state, changed }))
    }

    /// Calls `callback` for every commit from now on, while the handle exists.
    pub(crate) fn subscribe(&self, callback: WatchCallback) -> io::Result<WatchHandle> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_started {
            let shared = Arc::clone(&self.0);
            // Read before the caller can commit.
            let last = shared.identity();
            thread::Builder::new()
                .name("bifolio-tantivy-watch".to_owned())
                .spawn(move || shared.run(last))?;
            state.is_started = true;
        }
        Ok(self.0.callbacks.subscribe(callback))
    }

    /// Makes the thread look at once.
    pub(crate) fn look(&self) {
        self.0.update(|state| state.must_look = true);
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // Without waiting: a callback may drop the directory.
        self.0.update(|state| state.must_end = true);
    }
}

impl Shared {
    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn run(&self, mut last: Option<Identity>) {
        loop {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_idle = |state: &mut State| !state.must_look && !state.must_end;
            let waited = self.changed.wait_timeout_while(state, LOOK_INTERVAL, is_idle);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if state.must_end {
                return;
            }
            state.must_look = false;
            drop(state);
            let found = self.identity();
            if found.is_some() && found != last {
                last = found;
                // An error is a callback that panicked: the others were called.
                let _ = self.callbacks.broadcast().wait();
            }
        }
    }

    /// Returns `None` if the file does not exist, or cannot be looked at now.
    fn identity(&self) -> Option<Identity> {
        let found = fs::metadata(&self.meta_path).ok()?;
        Some((found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
    }
}
