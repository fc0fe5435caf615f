//! A trace through a cache: every reference reads 8 bytes of a page, and a backing in memory counts
//! the pages that it is asked for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bifolio::backing::{Backing, IoBuf, IoBufMut};
use bifolio::{Access, Cache, OpenOptions};

use crate::error::{Error, Result};

const PAGE_BYTES: u64 = 4096;
/// The name of the measured series.
pub(super) const BIFOLIO: &str = "bifolio";
/// References between two looks at the number of resident pages.
const SAMPLE_REFERENCES: usize = 512;

/// The outcome of a replay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replayed {
    pub(super) misses: u64,
    /// Pages in memory on average, once the cache was full.
    pub(super) resident_pages: u64,
}

/// Storage whose pages have their numbers as bytes, and that cannot be written.
#[derive(Debug)]
struct Counting {
    pages: u64,
    pages_read: AtomicU64,
}

impl Backing for Counting {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let end = self.pages * PAGE_BYTES;
        let count = (target.len() as u64).min(end.saturating_sub(position_bytes));
        let pages = count.div_ceil(PAGE_BYTES);
        self.pages_read.fetch_add(pages, Ordering::Relaxed);
        for page in 0..pages {
            let number = position_bytes / PAGE_BYTES + page;
            target.copy_from_slice((page * PAGE_BYTES) as usize, &number.to_le_bytes());
        }
        Ok(count as usize)
    }

    fn write_at(&self, _source: &IoBuf<'_>, _position_bytes: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.pages * PAGE_BYTES)
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn describe(&self) -> String {
        "a counting backing".into()
    }
}

/// The first pages of a trace as a file of their own, in a class with a floor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    pub(super) pages: u32,
    pub(super) floor_pages: u64,
}

/// Replays `trace`, whose pages are below `pages`, through a cache that has room for about
/// `wanted_pages` beside what it needs for itself. Misses are those of the tenant, if there is one.
pub(super) fn replay(
    trace: &[u32],
    pages: u32,
    wanted_pages: u64,
    tenant: Option<Tenant>,
) -> Result<Replayed> {
    let backing =
        |pages: u32| Arc::new(Counting { pages: u64::from(pages), pages_read: AtomicU64::new(0) });
    let cache = Cache::builder().memory(bound_bytes(u64::from(pages), wanted_pages)).build()?;
    let all = backing(pages);
    let file = cache.open_backing(all.clone(), &OpenOptions::new())?;
    file.set_access(Access::Random);
    let of_tenant = match tenant {
        Some(Tenant { pages, floor_pages }) => {
            cache.class("tenant")?.set_floor(floor_pages * PAGE_BYTES)?;
            let storage = backing(pages);
            let options = OpenOptions::new().class("tenant");
            let file = cache.open_backing(storage.clone(), &options)?;
            file.set_access(Access::Random);
            Some((pages, file, storage))
        }
        None => None,
    };
    let (mut sum, mut samples) = (0, 0);
    for (index, page) in trace.iter().enumerate() {
        let (position, mut bytes) = (u64::from(*page) * PAGE_BYTES, [0; 8]);
        match &of_tenant {
            Some((pages, file, _)) if page < pages => file.read_exact_at(&mut bytes, position)?,
            _ => file.read_exact_at(&mut bytes, position)?,
        }
        if u64::from_le_bytes(bytes) != u64::from(*page) {
            return Err(Error::WrongBytes { series: BIFOLIO.into(), pos_bytes: position });
        }
        if index % SAMPLE_REFERENCES == 0 {
            let stats = cache.stats();
            if stats.evictions.folios > 0 {
                sum += (stats.memory.frame_bytes - stats.memory.free_bytes) / PAGE_BYTES;
                samples += 1;
            }
        }
    }
    let counted = of_tenant.as_ref().map_or(&all, |(_, _, storage)| storage);
    let misses = counted.pages_read.load(Ordering::Relaxed);
    let resident_pages = sum.checked_div(samples).unwrap_or(misses);
    if let Some((_, file, _)) = of_tenant {
        file.close()?;
    }
    file.close()?;
    cache.close()?;
    Ok(Replayed { misses, resident_pages })
}

/// Returns a bound with room for `wanted_pages`, their descriptors, the tables of a file and the
/// free reserve.
fn bound_bytes(file_pages: u64, wanted_pages: u64) -> u64 {
    const DESCRIPTOR_BYTES: u64 = 64;
    const TABLE_BYTES: u64 = 8;
    let reserve_pages = (wanted_pages / 64).max(512.min(wanted_pages / 15));
    let frames = wanted_pages + reserve_pages;
    let table_pages = (file_pages * TABLE_BYTES).div_ceil(PAGE_BYTES) + 1;
    (frames + table_pages) * PAGE_BYTES + frames * DESCRIPTOR_BYTES
}
