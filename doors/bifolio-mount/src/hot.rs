//! The list of pages that were in memory at the last end of a mount (`--hot`).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bifolio::Cache;

/// Time between two saves: a program that is killed has no end.
const INTERVAL: Duration = Duration::from_secs(60);

/// Saves the list now and then, and once more when it is dropped, before the files are closed.
pub struct HotPages {
    /// Dropped to end the thread.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HotPages {
    /// Restores the pages of the list at `path`, if there is one. A list that cannot be used is
    /// logged and replaced later, unless it is something else.
    ///
    /// # Errors
    /// The directory of `path` does not exist, or is below `target`, the mount, which would wait
    /// for itself.
    pub fn of(path: Option<&Path>, cache: &Cache, target: &Path) -> Result<Option<Self>> {
        let Some(path) = path else { return Ok(None) };
        let named = || format!("--hot {}", path.display());
        // Once it is mounted, the program has another working directory.
        let path = std::path::absolute(path).with_context(named)?;
        let directory = path.parent().unwrap_or(&path).canonicalize().with_context(named)?;
        ensure!(!directory.starts_with(target), "{}: it is in the mounted directory", named());
        if let Err(error) = cache.restore_hot(&path)
            && std::io::Error::from(error.clone()).kind() != ErrorKind::NotFound
        {
            log::warn!("no pages are restored: {error}");
        }
        let (end, ended) = mpsc::channel();
        let cache = cache.clone();
        let run = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                save(&cache, &path);
            }
            save(&cache, &path);
        };
        let thread = thread::Builder::new().name("hot".into()).spawn(run)?;
        Ok(Some(Self { end: Some(end), thread: Some(thread) }))
    }
}

impl Drop for HotPages {
    fn drop(&mut self) {
        drop(self.end.take());
        // A panic of the thread has been reported already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn save(cache: &Cache, path: &PathBuf) {
    if let Err(error) = cache.save_hot(path) {
        log::warn!("the pages in memory are not saved: {error}");
    }
}
