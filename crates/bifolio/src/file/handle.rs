//! A handle: one open of a file, shared by the clones of its [`File`](super::File).
//!
//! A handle has its inode, and the [`Host`] that it shares with the other handles of the cache.
//! What is above it is called through traits: the open files, which make handles and are told of
//! their drop ([`Membership`]), and maps ([`Mapper`]). The server of its asynchronous calls, whose
//! type contains the files of those calls, is kept without its type ([`Attached`]).

use super::options::FaultMode;
use super::readahead::Readahead;
use super::write_hint::WriteHints;
use crate::config::Ablation;
use crate::dirt::ErrorCursor;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::Fill;
use crate::inode::{Inode, MappedPages, NoRoom, Resizing};
use crate::io::{FileIdentity, POSITION_BYTES_MAX};
use crate::memory::CacheState;
use crate::reclaim::Reclaim;
use crate::writeback::{check_outside_gate, grow_lsns, wait_for_room};
use std::any::Any;
use std::cmp;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// State of a cache that its handles share.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) cache_state: CacheState,
    /// `None` in a build without maps.
    pub(super) mapper: Option<Box<dyn Mapper>>,
    /// All servers of asynchronous calls.
    pub(super) call_servers: Attached,
    pub(super) ablation: Ablation,
}

impl Host {
    pub(crate) fn new(
        cache_state: CacheState,
        mapper: Option<Box<dyn Mapper>>,
        ablation: Ablation,
    ) -> Self {
        Self { cache_state, mapper, call_servers: Attached::default(), ablation }
    }

    /// Returns what serves a file that can be mapped; `None` for other files.
    pub(super) fn mapper_of(&self, inode: &Inode) -> Option<&dyn Mapper> {
        self.mapper.as_deref().filter(|_| inode.mapped.is_some())
    }
}

/// The place of a handle among the open files (`open`). Its drop closes the handle.
pub(super) trait Membership: Debug + Send + Sync {
    /// Returns the identity by which the file is found again; `None` if every open makes another.
    fn identity(&self) -> Option<FileIdentity>;

    /// Notes that the close that drops the handle has failed, and reported it to its caller.
    fn note_failed(&mut self);

    /// Makes an immutable handle beside this one, which is about to be dropped.
    ///
    /// # Errors
    /// Another handle may write; the cache is closed.
    fn join_immutable(&self) -> Result<Arc<Handle>>;

    /// Returns `true` if no change of the file by another program was seen since it is watched.
    fn is_unchanged(&self, inode: &Inode) -> bool;
}

/// Serves the files of a cache that can be mapped. A build without the feature `maps` has none.
pub(crate) trait Mapper: Debug + Send + Sync {
    /// Creates the memory for the pages of a file of at most `len_max_bytes` bytes.
    ///
    /// # Errors
    /// The kernel has no userfaultfd, or address space, a thread, or memory cannot be allocated.
    fn new_pages(
        &self,
        reclaim: &Reclaim,
        len_max_bytes: u64,
        faults: Option<FaultMode>,
    ) -> Result<Arc<dyn MappedPages>>;

    /// Serves faults of a file that can be mapped through `handle`, too.
    fn enlist(&self, handle: &Arc<Handle>);

    /// Serves no more faults of a file, which has no handle.
    fn forget(&self, inode: &Inode);

    /// Restores the `pages` of a file that have folios, and were discarded by the program. Blocks
    /// for the device.
    fn restore(&self, handle: &Handle, pages: Range<u64>) -> Result<()>;

    /// Prepares a shorter file to grow to `len_bytes` bytes: zeroes everything that raw writers
    /// have stored past its end, and removes pages that were poisoned for faults on truncated
    /// pages. The caller keeps the guard until the growth has succeeded or failed.
    fn uncover<'a>(
        &self,
        handle: &'a Handle,
        alone: &Resizing<'_>,
        len_bytes: u64,
    ) -> Result<Box<dyn MappedGrowth + 'a>>;
}

/// Guard held while a file that can be mapped grows: faults past the old end wait instead of
/// failing. Its drop ends the growth, too.
pub(crate) trait MappedGrowth: Debug {
    /// Ends the growth, whether or not the file grew.
    fn end(&mut self);
}

/// State shared by all clones of a [`File`](super::File).
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) host: Arc<Host>,
    pub(super) error_cursor: ErrorCursor,
    pub(super) readahead: Readahead,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) write_hints: WriteHints,
    /// Server of the handle's asynchronous calls, from the first that waits on.
    pub(super) call_server: Attached,
    /// Last field: the handle has dropped everything else when its file is told.
    pub(super) membership: Box<dyn Membership>,
}

impl Handle {
    pub(super) fn check_usable(&self) -> Result<()> {
        self.host.cache_state.check()
    }

    /// Fails if the cache is poisoned, closed, or belongs to a parent process.
    pub(crate) fn check_sound(&self) -> Result<()> {
        self.host.cache_state.check_sound(&self.inode.memory.soundness)
    }

    /// Returns what serves maps of the file, if it can be mapped.
    pub(super) fn mapper(&self) -> Option<&dyn Mapper> {
        self.host.mapper_of(&self.inode)
    }

    pub(crate) fn fill(&self) -> Fill<'_> {
        let state = &self.host.cache_state;
        Fill { inode: &self.inode, reclaim: &self.reclaim, state }
    }

    pub(crate) fn check_readable(&self) -> Result<()> {
        self.check_usable()?;
        if self.readable { Ok(()) } else { Err(self.not_opened_for("reading")) }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_sound()?;
        check_outside_gate(&self.inode)?;
        if self.writable { Ok(()) } else { Err(self.not_opened_for("writing")) }
    }

    #[cold]
    fn not_opened_for(&self, operation: &'static str) -> Error {
        let text = format!("not opened for {operation}");
        Error::new(ErrorKind::NotOpenedFor, text).in_file(self.inode.name())
    }

    /// Returns the end of a range, or an error if it is beyond 2^63.
    pub(crate) fn range_end(&self, position_bytes: u64, length_bytes: u64) -> Result<u64> {
        let end = position_bytes.checked_add(length_bytes);
        end.filter(|end| *end <= POSITION_BYTES_MAX).ok_or_else(|| {
            let text =
                format!("{length_bytes} bytes at position {position_bytes} lie beyond 2^63 - 1");
            let range = position_bytes..position_bytes.saturating_add(length_bytes);
            Error::new(ErrorKind::OutOfRange, text).in_file(self.inode.name()).at(range)
        })
    }

    /// Fails for a range of no bytes, of which `what` cannot be.
    pub(crate) fn check_not_empty(&self, range: &Range<u64>, what: &str) -> Result<()> {
        let problem = match range.start.cmp(&range.end) {
            cmp::Ordering::Less => return Ok(()),
            cmp::Ordering::Equal => format!("{what} of no bytes"),
            cmp::Ordering::Greater => format!("{range:?} is reversed"),
        };
        Err(Error::config("range", problem).in_file(self.inode.name()))
    }

    pub(super) fn check_range(&self, range: &Range<u64>) -> Result<u64> {
        self.range_end(range.start, range.end.saturating_sub(range.start))
    }

    /// Waits until a folio may become dirty that `no_room` kept clean. No folio lock is held.
    pub(super) fn make_room(
        &self,
        no_room: NoRoom,
        position_bytes: u64,
        length_bytes: u64,
    ) -> Result<()> {
        let (inode, bytes) = (&self.inode, position_bytes..position_bytes + length_bytes);
        match (no_room, &inode.device) {
            (NoRoom::DirtyLimit, Some(device)) => wait_for_room(inode, device, bytes),
            (NoRoom::DirtyLimit, None) => self.reclaim.wait_for_swap(inode, bytes),
            (NoRoom::Lsns, _) => {
                let grown = grow_lsns(inode, |bytes| self.reclaim.charge(bytes));
                grown.map_err(|error| error.wanted_for(|| inode.name(), bytes))
            }
        }
    }

    /// Returns `true` if a growth may wait for folio locks, because maps see the pages.
    pub(super) fn waits_to_grow(&self) -> bool {
        self.inode.page_space.is_in_place()
    }

    /// Fails if a file with a codec cannot have the length.
    pub(super) fn check_growth(&self, len_bytes: u64) -> Result<()> {
        let folio_bytes = self.inode.mapping.folio_bytes();
        if self.inode.codec.get().is_none() || len_bytes.is_multiple_of(folio_bytes) {
            return Ok(());
        }
        let problem =
            format!("{len_bytes} is no multiple of {folio_bytes}, and the file has a codec");
        Err(Error::config("the length of the file", problem).in_file(self.inode.name()))
    }

    pub(super) fn check_len(&self, wanted_bytes: u64) -> Result<()> {
        let len_max_bytes = self.inode.len_max_bytes();
        if wanted_bytes <= len_max_bytes {
            return Ok(());
        }
        let remedy = match self.inode.page_space.is_in_place() {
            true => "OpenOptions::len_max of the first open: a mappable file keeps its maximum",
            false => "OpenOptions::len_max, File::raise_len_max",
        };
        let text =
            format!("cannot grow to {wanted_bytes} bytes, only to {len_max_bytes} ({remedy})");
        Err(Error::new(ErrorKind::TooLong, text).in_file(self.inode.name()))
    }
}

/// Something that a floor above keeps in a struct of this one, once. Only that floor knows its
/// type.
#[derive(Debug, Default)]
pub(super) struct Attached(OnceLock<Arc<dyn Any + Send + Sync>>);

impl Attached {
    /// Returns what is attached. `None` if nothing is, or something of another type.
    pub(super) fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        Arc::clone(self.0.get()?).downcast().ok()
    }

    /// Attaches `made`, unless something is attached. Returns what is attached then.
    pub(super) fn get_or_attach<T: Any + Send + Sync>(&self, made: Arc<T>) -> Arc<T> {
        let attached = self.0.get_or_init(|| Arc::clone(&made) as _);
        Arc::clone(attached).downcast().unwrap_or(made)
    }
}
