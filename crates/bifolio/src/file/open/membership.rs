//! The place of a handle among the open files: its drop is the close of the handle, perhaps the
//! last of its file.

use super::closing::is_held_back;
use super::{FileKey, Registry};
use crate::error::{Error, ErrorKind, Result};
use crate::file::handle::Membership;
use crate::file::{Handle, OpenOptions};
use crate::inode::Inode;
use crate::io::FileIdentity;
use crate::sync::Ordering;
use std::sync::Arc;

/// Keeps the registry, so that it outlives every handle.
#[derive(Debug)]
pub(super) struct OpenMembership {
    registry: Arc<Registry>,
    key: FileKey,
    is_writable: bool,
    is_immutable: bool,
    /// Set if the close that drops the handle has failed in CLOSE-L1 and reported it to its caller.
    has_failed: bool,
}

impl OpenMembership {
    pub(super) fn new(registry: &Arc<Registry>, key: FileKey, options: &OpenOptions) -> Self {
        let registry = Arc::clone(registry);
        let (is_writable, is_immutable) = (options.write, options.immutable);
        Self { registry, key, is_writable, is_immutable, has_failed: false }
    }
}

impl Membership for OpenMembership {
    fn identity(&self) -> Option<FileIdentity> {
        match self.key {
            FileKey::Identified(identity) => Some(identity),
            FileKey::Single(_) => None,
        }
    }

    fn note_failed(&mut self) {
        self.has_failed = true;
    }

    fn join_immutable(&self) -> Result<Arc<Handle>> {
        let mut options = OpenOptions::new();
        options.immutable = true;
        let joined = self.registry.files.look(self.key, |open| {
            if open.writable > u64::from(self.is_writable) {
                let text = "immutable: another handle of it in this cache is writable".to_owned();
                return Err(Error::conflict(open.inode.name(), text));
            }
            self.registry.make_handle(self.key, open, &options)
        });
        joined.unwrap_or_else(|| Err(Error::new(ErrorKind::Closed, "the cache is closed")))
    }

    fn is_unchanged(&self, inode: &Inode) -> bool {
        self.identity().is_some_and(|identity| self.registry.is_unchanged(identity, inode))
    }
}

impl Drop for OpenMembership {
    fn drop(&mut self) {
        let Self { registry, key, .. } = self;
        if registry.host.cache_state.is_forked() {
            return;
        }
        let is_last = registry.files.look(*key, |open| {
            open.handles -= 1;
            open.writable -= u64::from(self.is_writable);
            open.immutable -= u64::from(self.is_immutable);
            open.handles == 0
        });
        if is_last == Some(true) {
            registry.retire_logged(*key, self.has_failed);
            // Relaxed: the lock of the slots orders it, whichever thread was the first there.
            if registry.has_no_cache.load(Ordering::Relaxed) {
                registry.give_up(*key, is_held_back);
            }
        }
    }
}
