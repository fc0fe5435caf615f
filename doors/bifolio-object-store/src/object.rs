//! Versions of objects: their identity, and what is known of them.
//!
//! [`Known`] remembers the version of an object that was seen last: in an answer to a read, or in a
//! list. It is a hint: a read checks it with the store, unless the builder allowed an age.

use super::object_store;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use object_store::path::Path;
use object_store::{Attributes, ObjectMeta};
use sha2::{Digest, Sha256};

/// Identifies one version of one object of one store.
pub(crate) type ObjectId = [u8; 16];

/// Limits of the number of objects of which a version is remembered, 400 bytes each.
const KNOWN_MAX: RangeInclusive<usize> = 8192..=1 << 20;
/// Locations are hashed to so many counters of changes.
const CHANGE_COUNTERS: usize = 64;

/// One version of an object.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) meta: ObjectMeta,
    /// Attributes; `None` if the version was seen in a list only.
    pub(crate) attributes: Option<Attributes>,
    pub(crate) id: ObjectId,
    /// When the request began that returned this version.
    pub(crate) seen_at: Instant,
}

impl Object {
    pub(crate) fn new(
        store: &str,
        meta: ObjectMeta,
        attributes: Option<Attributes>,
        seen_at: Instant,
    ) -> Self {
        let id = identity(store, &meta);
        Self { meta, attributes, id, seen_at }
    }

    pub(crate) fn location(&self) -> &Path {
        &self.meta.location
    }

    /// Returns the condition under which the store sends bytes of this version only.
    pub(crate) fn if_match(&self) -> Option<&str> {
        strong_tag(&self.meta)
    }
}

/// Returns the ETag, unless it is weak: objects with equal weak ETags may differ in bytes.
fn strong_tag(meta: &ObjectMeta) -> Option<&str> {
    meta.e_tag.as_deref().filter(|tag| !tag.starts_with("W/") && !tag.is_empty() && *tag != "*")
}

/// Returns the identity of a version: store, location, size, and the ETag, or the version where
/// there is no strong ETag, or the time of the last change where there is neither.
fn identity(store: &str, meta: &ObjectMeta) -> ObjectId {
    let modified = meta.last_modified.timestamp_nanos_opt().unwrap_or_default().to_string();
    let (kind, tag) = match (strong_tag(meta), &meta.version) {
        (Some(tag), _) => ("etag", tag),
        (None, Some(version)) => ("version", &**version),
        (None, None) => ("modified", &*modified),
    };
    let mut hash = Sha256::new();
    for field in [store, meta.location.as_ref(), &meta.size.to_string(), kind, tag] {
        hash.update((field.len() as u64).to_le_bytes());
        hash.update(field);
    }
    let digest = hash.finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    id
}

/// Counts of changes at the time when a request began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Began {
    changes: [u64; CHANGE_COUNTERS],
    pub(crate) at: Instant,
}

/// The versions seen last.
pub(crate) struct Known {
    hasher: RandomState,
    objects_max: usize,
    state: Mutex<State>,
}

struct State {
    objects: HashMap<Path, Arc<Object>>,
    /// Changes made through this store, by hash of the location. A version that was requested
    /// before a change is not remembered after it.
    changes: [u64; CHANGE_COUNTERS],
}

impl Known {
    /// Returns an empty one for `objects_max` objects, within limits.
    pub(crate) fn new(objects_max: usize) -> Self {
        let state = State { objects: HashMap::new(), changes: [0; CHANGE_COUNTERS] };
        let objects_max = objects_max.clamp(*KNOWN_MAX.start(), *KNOWN_MAX.end());
        Self { hasher: RandomState::new(), objects_max, state: Mutex::new(state) }
    }

    pub(crate) fn get(&self, location: &Path) -> Option<Arc<Object>> {
        self.state().objects.get(location).cloned()
    }

    /// Notes that a request begins.
    pub(crate) fn begin(&self) -> Began {
        Began { changes: self.state().changes, at: Instant::now() }
    }

    /// Returns `true` if no object was changed through this store since `began`.
    pub(crate) fn is_unchanged(&self, began: &Began) -> bool {
        self.state().changes == began.changes
    }

    /// Remembers a version that the store returned to a request that began at `began`.
    pub(crate) fn learn(&self, object: Object, began: &Began) -> Arc<Object> {
        let counter = self.counter(object.location());
        let mut state = self.state();
        let mut object = object;
        if let Some(known) = state.objects.get(object.location()) {
            if object.attributes.is_none() && known.id == object.id {
                object.attributes.clone_from(&known.attributes);
            }
            if known.seen_at > object.seen_at {
                return Arc::new(object);
            }
        }
        let object = Arc::new(object);
        if state.changes[counter] == began.changes[counter] {
            if state.objects.len() >= self.objects_max
                && !state.objects.contains_key(object.location())
                && let Some(any) = state.objects.keys().next().cloned()
            {
                state.objects.remove(&any);
            }
            state.objects.insert(object.location().clone(), Arc::clone(&object));
        }
        object
    }

    /// Forgets a version that was found to be old.
    pub(crate) fn forget(&self, object: &Object) {
        let mut state = self.state();
        if state.objects.get(object.location()).is_some_and(|known| known.id == object.id) {
            state.objects.remove(object.location());
        }
    }

    /// Notes a change of the object through this store. Returns the version that was known.
    pub(crate) fn change(&self, location: &Path) -> Option<Arc<Object>> {
        let counter = self.counter(location);
        let mut state = self.state();
        state.changes[counter] += 1;
        state.objects.remove(location)
    }

    /// Forgets all objects under a prefix, as [`Known::change`] does with one. Returns the versions
    /// that were known.
    pub(crate) fn change_all(&self, prefix: &Path) -> Vec<ObjectId> {
        let mut state = self.state();
        state.changes.iter_mut().for_each(|count| *count += 1);
        let objects = &mut state.objects;
        let changed = objects.extract_if(|location, _| location.prefix_matches(prefix));
        changed.map(|(_, object)| object.id).collect()
    }

    fn counter(&self, location: &Path) -> usize {
        self.hasher.hash_one(location) as usize % CHANGE_COUNTERS
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let objects = self.state().objects.len();
        formatter.debug_struct("Known").field("objects", &objects).finish_non_exhaustive()
    }
}
