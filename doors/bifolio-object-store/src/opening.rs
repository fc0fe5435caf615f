//! The version of an object: that seen last, or that which the store returns for its metadata.
//!
//! Readers that know no version share one request. A task sends it, so that a reader whose future is
//! leaked holds up no other; it is aborted when the last of them drops its future.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared as SharedFuture, WeakShared};
use object_store::path::Path;
use object_store::{Extensions, GetOptions, ObjectStore, Result};
use tokio::time::timeout;

use super::error::{CacheError, Failure};
use super::fetch;
use super::metrics::add;
use super::object::Object;
use super::object_store;
use super::read::Shared;
use super::task::in_task;

/// Ends when the version is known; `None` if the task was aborted.
type Opening = BoxFuture<'static, Option<Result<(), Arc<object_store::Error>>>>;

/// The requests for versions that are under way.
pub(crate) type Openings = HashMap<Path, WeakShared<Opening>>;

impl Shared {
    /// Asks the store for the metadata of an object. Asks again if the store does not answer.
    pub(crate) async fn head(
        &self,
        location: &Path,
        extensions: &Extensions,
    ) -> Result<Arc<Object>> {
        let runtime = self.runtime()?;
        for _ in 0..=fetch::RETRIES_MAX {
            let began = self.known.begin();
            let extensions = extensions.clone();
            let options = GetOptions { head: true, extensions, ..GetOptions::default() };
            add(&self.counters.head_requests, 1);
            let started = Instant::now();
            let answer = {
                let _entered = runtime.enter();
                timeout(self.stall_timeout, self.store.get_opts(location, options))
            };
            let answer = answer.await;
            add(&self.counters.store_wait_us, started.elapsed().as_micros() as u64);
            let Ok(answer) = answer else {
                add(&self.counters.retries, 1);
                continue;
            };
            if matches!(answer, Err(object_store::Error::NotFound { .. }))
                && let Some(known) = self.known.get(location)
            {
                self.known.forget(&known);
            }
            return Ok(self.learn(location, &answer?, &began));
        }
        let (location, waited) = (location.to_string(), self.stall_timeout);
        Err(CacheError::Stalled { location, range: None, waited }.into())
    }

    /// Returns `true` if a read that began at `since` needs no confirmation of the version.
    pub(crate) fn is_current(&self, object: &Object, since: Instant) -> bool {
        object.seen_at >= since || self.head_age.is_some_and(|age| object.seen_at.elapsed() < age)
    }

    /// Returns the version seen last. If there is none, asks the store, once for all readers.
    pub(crate) async fn object(
        self: &Arc<Self>,
        location: &Path,
        extensions: &Extensions,
    ) -> Result<Arc<Object>> {
        if let Some(object) = self.known.get(location) {
            return Ok(object);
        }
        let (opening, is_first) = self.opening(location, extensions)?;
        let opened = opening.await;
        match (opened, self.known.get(location)) {
            (_, Some(object)) => Ok(object),
            (Some(Err(error)), None) if is_first => Err(Failure::Store(error).into_error(location)),
            // Its runtime has shut down, or the request is older than a change of the object.
            _ => self.head(location, extensions).await,
        }
    }

    /// Returns the request for the version of an object, and `true` if it is a new one.
    fn opening(
        self: &Arc<Self>,
        location: &Path,
        extensions: &Extensions,
    ) -> Result<(SharedFuture<Opening>, bool)> {
        let runtime = self.runtime()?;
        let mut openings = self.openings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opening) = openings.get(location).and_then(WeakShared::upgrade) {
            return Ok((opening, false));
        }
        openings.retain(|_, opening| opening.upgrade().is_some());
        let (shared, path) = (Arc::clone(self), location.clone());
        let extensions = extensions.clone();
        let work = async move {
            let opened = shared.head(&path, &extensions).await;
            // A leaked reader may keep the result for ever: later readers ask again.
            shared.openings.lock().unwrap_or_else(PoisonError::into_inner).remove(&path);
            opened.map(|_| ()).map_err(Arc::new)
        };
        let opening = in_task(&runtime, work).boxed().shared();
        if let Some(weak) = opening.downgrade() {
            openings.insert(location.clone(), weak);
        }
        Ok((opening, true))
    }
}
