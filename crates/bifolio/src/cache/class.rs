//! Classes of files, and memory of the program under the bound.

use super::Cache;
use crate::config;
use crate::error::{Error, Result};
use crate::memory::Limits;
use crate::page::{CLASSES_MAX, ClassId, PAGE_BYTES};
use crate::reclaim::Reclaim;
use crate::sys::process::Origin;
use std::fmt;
use std::sync::Arc;

const NAME_BYTES_MAX: usize = 255;

/// A part of the memory of a cache, for the files that are opened in it
/// ([`OpenOptions::class`](crate::OpenOptions::class)): the index beside the data, one tenant
/// beside another. Cheap to clone; all clones are one class, which lives as long as the cache. One
/// that is held keeps the address space of the cache.
///
/// A class has eviction lists of its own. When memory is short, classes give pages in proportion to
/// what they have above their *floors*; one that has no more than its floor gives none while
/// another can. A class at its *ceiling* evicts its own pages for new ones. Files without a class
/// share one without floor and ceiling.
///
/// Pages of memory files without a swap cannot be evicted, and count for no class. Tables and
/// descriptors count for none either.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("index");
/// # std::fs::write(&path, vec![7; 1 << 20])?;
/// use bifolio::{Cache, OpenOptions};
/// let cache = Cache::builder().memory(16 << 20).build()?;
/// let index = cache.class("index")?;
/// index.set_floor(4 << 20)?;
/// let file = cache.open(&path, &OpenOptions::new().class("index"))?;
/// file.read_exact_at(&mut vec![0; 1 << 20], 0)?;
/// assert_eq!(index.stats().resident_bytes, 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Class {
    reclaim: Arc<Reclaim>,
    origin: Origin,
    id: ClassId,
}

/// A snapshot of a class ([`Class::stats`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Name of the class.
    pub name: String,
    /// Floor, bytes.
    pub floor_bytes: u64,
    /// Ceiling, bytes; `u64::MAX` if there is none.
    pub ceiling_bytes: u64,
    /// Order in which classes above their floors give pages: the lowest first.
    pub order: u8,
    /// Pages of its files in memory, bytes.
    pub resident_bytes: u64,
    /// Lookups that found no page, since the class was made.
    pub misses: u64,
    /// Of these, misses of pages that had been evicted and left a shadow.
    pub refaults: u64,
    /// Bytes of pages that were evicted, by reclaim or on request.
    pub evicted_bytes: u64,
}

impl fmt::Debug for Class {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Class").field(&self.id.number()).finish()
    }
}

impl Class {
    /// Sets the memory in bytes, rounded down to pages, that others cannot take from the class; 0
    /// when it is made. It is not reserved: while the class has less, others use it.
    ///
    /// If nothing above the floors can be evicted, since it is pinned or cannot be written, pages
    /// below them are, before a call fails. So are those in the way of a lower bound
    /// ([`Cache::set_memory`]) and of a reservation ([`Cache::reserve`]), which empty whole chunks;
    /// neither changes the floors. Pages are evicted in batches: a class may be left with up to 31
    /// fewer than its floor, until it reads others.
    ///
    /// # Errors
    /// More than the ceiling, or than what the floors of other classes leave of seven eighths of
    /// the bound ([`ErrorKind::Config`](crate::ErrorKind::Config)); a forked child.
    pub fn set_floor(&self, bytes: u64) -> Result<()> {
        let pages = bytes / PAGE_BYTES;
        self.change(|limits, others_pages| {
            let bound_bytes = self.reclaim.memory.arena.bound_bytes();
            let most_bytes =
                config::promised_bytes_max(bound_bytes).saturating_sub(others_pages * PAGE_BYTES);
            if bytes > most_bytes {
                let problem = format!(
                    "a floor of {bytes} bytes is more than the {most_bytes} that the floors of \
                     other classes leave of seven eighths of the bound"
                );
                return Err(Error::config("class", problem));
            }
            if pages > limits.ceiling_pages {
                let ceiling_bytes = limits.ceiling_pages * PAGE_BYTES;
                let problem =
                    format!("a floor of {bytes} bytes is above the ceiling of {ceiling_bytes}");
                return Err(Error::config("class", problem));
            }
            limits.floor_pages = pages;
            Ok(())
        })
    }

    /// Sets the most memory in bytes, rounded down to pages, that pages of the class may have;
    /// `None`, as when it is made, for as much as the bound allows. A new page of a class that has
    /// as much takes the place of another of its pages; if those are pinned or cannot be written,
    /// the call fails with [`ErrorKind::Full`](crate::ErrorKind::Full), as in a cache that is full.
    ///
    /// If it is lowered, clean pages above it are evicted before the call returns, and others by
    /// the next misses of the class. Blocks while another thread evicts pages.
    ///
    /// # Errors
    /// Less than the floor, or than 64 KiB ([`ErrorKind::Config`](crate::ErrorKind::Config)); a
    /// forked child.
    pub fn set_ceiling(&self, bytes: Option<u64>) -> Result<()> {
        self.change(|limits, _| {
            let pages = bytes.map_or(u64::MAX, |bytes| bytes / PAGE_BYTES);
            let least_pages = limits.floor_pages.max(CEILING_PAGES_MIN);
            if pages < least_pages {
                let problem = format!(
                    "a ceiling of {} bytes is less than the floor, or than 64 KiB: {}",
                    bytes.unwrap_or(u64::MAX),
                    least_pages * PAGE_BYTES
                );
                return Err(Error::config("class", problem));
            }
            limits.ceiling_pages = pages;
            Ok(())
        })?;
        self.reclaim.shrink_to_ceiling(self.id);
        Ok(())
    }

    /// Sets the order in which classes that are above their floors give pages: one of a higher
    /// order gives when those of lower orders have no more than their floors. 128 when the class is
    /// made, and always for files without a class. Does nothing in a forked child.
    pub fn set_order(&self, order: u8) {
        let set = |limits: &mut Limits, _| {
            limits.order = order;
            Ok(())
        };
        // Fails only in a forked child.
        let _is_set = self.change(set);
    }

    /// Returns a snapshot of the class: its limits, its memory, and what has happened to its pages.
    /// Never blocks for storage. In a forked child everything is 0.
    pub fn stats(&self) -> ClassStats {
        if self.origin.is_forked() {
            return ClassStats::default();
        }
        let classes = &self.reclaim.memory.lru.classes;
        let (limits, counts) = (classes.limits(self.id), classes.counts(self.id));
        ClassStats {
            name: classes.name(self.id),
            floor_bytes: limits.floor_pages * PAGE_BYTES,
            ceiling_bytes: limits.ceiling_pages.saturating_mul(PAGE_BYTES),
            order: limits.order,
            resident_bytes: counts.pages * PAGE_BYTES,
            misses: counts.misses,
            refaults: counts.refaults,
            evicted_bytes: counts.evicted_pages * PAGE_BYTES,
        }
    }

    fn change(&self, change: impl FnOnce(&mut Limits, u64) -> Result<()>) -> Result<()> {
        if self.origin.is_forked() {
            return Err(Error::forked());
        }
        self.reclaim.memory.lru.classes.change_limits(self.id, change)
    }
}

/// Least ceiling, pages: a run of adjacent frames.
const CEILING_PAGES_MIN: u64 = 16;

/// Memory of the program that counts within the bound of a cache ([`Cache::reserve`]), until this
/// is dropped.
#[must_use = "the memory counts until this is dropped"]
pub struct Reserved {
    reclaim: Arc<Reclaim>,
    origin: Origin,
    bytes: u64,
}

impl fmt::Debug for Reserved {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reserved").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Reserved {
    /// Returns the bytes that count.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the bytes that count: evicts pages for more, as [`Cache::reserve`] does, or lets the
    /// cache use the rest.
    ///
    /// # Errors
    /// Those of [`Cache::reserve`], and a forked child; then nothing changes.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        if self.origin.is_forked() {
            return Err(Error::forked());
        }
        if bytes > self.bytes {
            self.reclaim.reserve(bytes - self.bytes)?;
        } else {
            self.reclaim.end_reservation(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.origin.is_forked() {
            self.reclaim.end_reservation(self.bytes);
        }
    }
}

impl Cache {
    /// Returns the class of this name, and makes it if there is none: without a floor, without a
    /// ceiling, of order 128. A cache has room for 15; they live as long as it does.
    ///
    /// # Errors
    /// A 16th class; a name that is empty or longer than 255 bytes
    /// ([`ErrorKind::Config`](crate::ErrorKind::Config)); a closed cache.
    pub fn class(&self, name: &str) -> Result<Class> {
        self.inner.registry.check()?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let problem = format!("a name has 1 to {NAME_BYTES_MAX} bytes, not {}", name.len());
            return Err(Error::config("class", problem));
        }
        let reclaim = &self.inner.registry.reclaim;
        let id = reclaim.memory.lru.classes.find_or_add(name).ok_or_else(|| {
            let most = CLASSES_MAX - 1;
            Error::config("class", format!("`{name}` would be one more than the {most} classes"))
        })?;
        Ok(self.class_of(id))
    }

    fn class_of(&self, id: ClassId) -> Class {
        let registry = &self.inner.registry;
        let origin = registry.host.cache_state.origin();
        Class { reclaim: Arc::clone(&registry.reclaim), origin, id }
    }

    /// Returns a snapshot of each class, in the order in which they were made. Empty in a forked
    /// child.
    pub fn classes(&self) -> Vec<ClassStats> {
        if self.inner.registry.host.cache_state.is_forked() {
            return Vec::new();
        }
        let reclaim = &self.inner.registry.reclaim;
        let classes = reclaim.memory.lru.classes.all().filter(|id| !id.is_default());
        classes.map(|id| self.class_of(id).stats()).collect()
    }

    /// Counts `bytes` of the program's own memory within the bound, until the result is dropped:
    /// the memtable, the sort buffer, the arena of a query. The cache has that much less for pages.
    /// Allocates nothing. Evicts pages to make room, and blocks while dirty ones are written out.
    ///
    /// # Errors
    /// More than is left of seven eighths of the bound by other reservations; pages that are pinned
    /// or cannot be written out ([`ErrorKind::Full`](crate::ErrorKind::Full)); a closed cache.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
    /// let memtable = cache.reserve(4 << 20)?;
    /// assert!(cache.stats().memory.reserved_bytes == 4 << 20);
    /// drop(memtable);
    /// assert!(cache.stats().memory.reserved_bytes == 0);
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn reserve(&self, bytes: u64) -> Result<Reserved> {
        self.inner.registry.check()?;
        let registry = &self.inner.registry;
        registry.reclaim.reserve(bytes)?;
        let origin = registry.host.cache_state.origin();
        Ok(Reserved { reclaim: Arc::clone(&registry.reclaim), origin, bytes })
    }
}
