//! Mappable files: what those of a cache share, their calls for maps, and their growth.

use crate::error::{Error, Result};
use crate::file::{FaultMode, File, Handle, MapInUse, MappedGrowth, Mapper, OpenOptions};
use crate::fill::{AccessMode, Locked};
use crate::inode::{Inode, MappedPages, Resizing, removal};
use crate::maps::faults::{self, FaultThreads};
use crate::maps::kernel::signal;
use crate::maps::kernel::userfault::Userfault;
use crate::maps::region::{Region, Regions};
use crate::maps::unmap;
use crate::page::{PAGE_BYTES, PAGE_SHIFT, TABLE_PAGE_BYTES, pages_of};
use crate::reclaim::Reclaim;
use crate::sync::Mutex;
use crate::sys::probe::{Feature, Features};
use std::io;
use std::ops::Range;
use std::sync::Arc;

impl OpenOptions {
    /// Opens the file so that it can be mapped ([`File::map`](crate::File::map)): its pages have
    /// fixed addresses, and evicting them is work for the kernel, so use it only for files that you
    /// map. Needs folios of 4 KiB. The first open decides: later handles of the file may omit it,
    /// and cannot add it.
    pub fn mappable(mut self, mappable: bool) -> Self {
        self.mappable = mappable;
        self
    }

    /// Selects the threads that serve faults of a file that can be mapped. The first open decides;
    /// a later one that asks for others is refused
    /// ([`ErrorKind::OptionConflict`](crate::ErrorKind::OptionConflict)).
    pub fn faults(mut self, faults: FaultMode) -> Self {
        self.faults = Some(faults);
        self
    }
}

#[derive(Debug)]
struct MapParts {
    regions: Arc<Regions>,
    /// Faults that threads serve; `None` until the first such file.
    threads: Option<(Arc<Userfault>, FaultThreads)>,
    /// Faults that raise signals; `None` until the first such file.
    in_thread: Option<Arc<Userfault>>,
}

#[derive(Debug)]
pub(crate) struct MapResources {
    features: Features,
    unmap_batch_folios: usize,
    /// `None` until the first file.
    made: Mutex<Option<MapParts>>,
}

impl MapResources {
    pub(crate) fn new(features: &Features, unmap_batch_folios: usize) -> Self {
        Self { features: features.clone(), unmap_batch_folios, made: Mutex::default() }
    }

    fn make(&self, reclaim: &Reclaim) -> Result<MapParts> {
        let size = unmap::regions_size(reclaim, self.unmap_batch_folios);
        reclaim.charge(size.bytes())?;
        let regions = Regions::new(size, &self.features, &reclaim.memory.soundness);
        let regions = regions.inspect_err(|_| reclaim.memory.arena.uncharge(size.bytes()));
        let regions = Arc::new(regions.map_err(refused)?);
        Ok(MapParts { regions, threads: None, in_thread: None })
    }

    fn served_by_threads(&self, parts: &mut MapParts) -> Result<Arc<Userfault>> {
        if let Some((userfault, _)) = &parts.threads {
            return Ok(Arc::clone(userfault));
        }
        let userfault = Arc::new(Userfault::open(&self.features, false).map_err(refused)?);
        let threads = FaultThreads::start(&userfault, &parts.regions).map_err(Error::thread)?;
        parts.threads = Some((Arc::clone(&userfault), threads));
        Ok(userfault)
    }

    fn served_in_thread(&self, parts: &mut MapParts) -> Result<Arc<Userfault>> {
        if let Some(userfault) = &parts.in_thread {
            return Ok(Arc::clone(userfault));
        }
        let userfault = Arc::new(Userfault::open(&self.features, true).map_err(refused)?);
        signal::install(faults::serve_in_thread).map_err(refused)?;
        parts.in_thread = Some(Arc::clone(&userfault));
        Ok(userfault)
    }
}

impl Mapper for MapResources {
    fn new_pages(
        &self,
        reclaim: &Reclaim,
        len_max_bytes: u64,
        faults: Option<FaultMode>,
    ) -> Result<Arc<dyn MappedPages>> {
        if let Some(reason) = self.features.why_not(Feature::UserFaults) {
            return Err(Error::cannot_map("", &reason));
        }
        let mut made = self.made.lock();
        if made.is_none() {
            *made = Some(self.make(reclaim)?);
        }
        let parts = made.as_mut().expect("made just now");
        let userfault = match faults.unwrap_or_default() {
            FaultMode::Threads => self.served_by_threads(parts)?,
            FaultMode::InThread => self.served_in_thread(parts)?,
        };
        let pages = len_max_bytes.div_ceil(PAGE_BYTES).max(1);
        let region = Region::new(pages, &userfault, &parts.regions).map_err(refused)?;
        Ok(Arc::new(region))
    }

    fn enlist(&self, handle: &Arc<Handle>) {
        faults::enlist(handle);
    }

    fn forget(&self, inode: &Inode) {
        faults::forget(&inode.page_space);
    }

    fn restore(&self, handle: &Handle, pages: Range<u64>) -> Result<()> {
        faults::restore(handle, pages)
    }

    fn uncover<'a>(
        &self,
        handle: &'a Handle,
        alone: &Resizing<'_>,
        len_bytes: u64,
    ) -> Result<Box<dyn MappedGrowth + 'a>> {
        Ok(Box::new(RegionGrowth::begin(handle, alone, len_bytes)?))
    }
}

fn refused(source: io::Error) -> Error {
    Error::memory("a file that can be mapped (OpenOptions::len_max)", source)
}

/// Table pages charged when a memory file is mapped: those of its first 128 MiB. The others are
/// charged when they are touched, because a map may be large and sparse.
const TABLES_MAX: usize = 64;

/// Counts a map as in use, and its pages as mapped, while it exists. Must be dropped before the
/// map's file.
#[derive(Debug)]
pub(super) struct MapGuard {
    pub(super) in_use: MapInUse,
    mapped: Option<(Arc<Region>, Range<u64>)>,
}

impl Drop for MapGuard {
    fn drop(&mut self) {
        // In a forked child, locks may be held by threads that do not exist there.
        if let Some((region, pages)) = self.mapped.take().filter(|_| !self.in_use.is_forked()) {
            region.mapped.remove(&pages);
            // So that the thread that drops the map closes the file, and not the one that served
            // the last fault.
            if let Some(services) = faults::services_in(&region) {
                services.wait_for_begun();
            }
        }
    }
}

impl File {
    /// Returns the region of the file and a guard, if `range` can be mapped.
    pub(super) fn begin_map(&self, range: &Range<u64>) -> Result<(Arc<Region>, MapGuard)> {
        let handle = &self.handle;
        // Before the check, so that a concurrent close sees the map.
        let mut guard = MapGuard { in_use: MapInUse::begin(&handle.host), mapped: None };
        handle.check_sound()?;
        handle.check_readable()?;
        handle.check_not_empty(range, "a map")?;
        let length_bytes = range.end - range.start;
        handle.range_end(range.start, length_bytes)?;
        let region = Region::shared_of(&handle.inode.page_space);
        let region = region.ok_or_else(|| Error::not_mappable(handle.inode.name()))?;
        faults::check_signals(&region).map_err(|error| error.in_file(handle.inode.name()))?;
        if range.end > self.len() {
            return Err(handle.inode.past_end(range.start, length_bytes));
        }
        let pages = pages_of(range);
        if handle.inode.is_memory_file() {
            // Here it is an error; at a store, the end of the process.
            let step = (TABLE_PAGE_BYTES / size_of::<u64>() as u64) as usize;
            for index in pages.clone().step_by(step).chain([pages.end - 1]).take(TABLES_MAX) {
                let charged = handle.reclaim.charge_table(&handle.inode, index);
                charged.map_err(|error| {
                    error.wanted_for(|| handle.inode.name(), index * PAGE_BYTES..range.end)
                })?;
            }
        }
        region.mapped.add(pages.clone());
        guard.mapped = Some((Arc::clone(&region), pages));
        Ok((region, guard))
    }
}

/// Guard held while a file in a region grows: faults past the old end wait instead of failing
/// (STRAY-G1 to STRAY-G3).
#[derive(Debug)]
struct RegionGrowth<'a> {
    region: Option<&'a Region>,
    /// File with a backing and its length before, if raw writers may store past its end.
    uncovered: Option<(&'a Handle, u64)>,
}

impl MappedGrowth for RegionGrowth<'_> {
    fn end(&mut self) {
        if let Some(region) = self.region.take() {
            region.stray_pages.end_growth();
        }
    }
}

impl Drop for RegionGrowth<'_> {
    fn drop(&mut self) {
        self.end();
        // A raw store past the old end, made since the bytes there were zeroed, is part of the file
        // now. A write-out of its page ended at the old length.
        if let Some((handle, before_bytes)) = self.uncovered
            && handle.inode.mapping.len_bytes() > before_bytes
            && let Some(Locked { folio, lock, .. }) =
                handle.fill().find_resident(before_bytes >> PAGE_SHIFT)
        {
            handle.inode.mark_stored(&lock, folio.id());
        }
    }
}

impl<'a> RegionGrowth<'a> {
    /// Prepares a file in a region to grow to `len_bytes` bytes ([`Mapper::uncover`]).
    fn begin(handle: &'a Handle, _alone: &Resizing<'_>, len_bytes: u64) -> Result<Self> {
        let inode = &handle.inode;
        let before_bytes = inode.mapping.len_bytes();
        let mut growing = Self { region: Region::of(&inode.page_space), uncovered: None };
        let Some(region) = growing.region else { return Ok(growing) };
        let pages = before_bytes.div_ceil(PAGE_BYTES)..len_bytes.div_ceil(PAGE_BYTES);
        let begun = region.stray_pages.begin_growth(&region.addresses, pages.clone());
        let purpose = "pages past the end of a file";
        begun.map_err(|source| Error::memory(purpose, source))?;
        for index in region.stray_pages.orphaned_among(pages) {
            // A reference to the truncated page exists, and maps see the page: it stays and is
            // zeroed, as for a partial write.
            let end = (index + 1) * PAGE_BYTES;
            if let Err(error) =
                handle.fill().lock_folio(index, AccessMode::Write { start: end - 1, end })
            {
                removal::remove_folios_from(inode, before_bytes.next_multiple_of(PAGE_BYTES));
                return Err(error);
            }
        }
        if region.is_tracked() {
            handle.zero_tail(before_bytes)?;
            let ends_in_page = !before_bytes.is_multiple_of(PAGE_BYTES);
            growing.uncovered =
                (ends_in_page && !inode.is_memory_file()).then_some((handle, before_bytes));
        }
        Ok(growing)
    }
}
