//! Shared resources of files that can be mapped: created with the first of them.

use crate::error::{Error, Result};
use crate::maps::faults::FaultThreads;
use crate::maps::kernel::userfault::Userfault;
use crate::maps::region::{Region, Regions};
use crate::page::PAGE_BYTES;
use crate::reclaim::Reclaim;
use crate::sync::Mutex;
use crate::sys::probe::{Feature, Features};
use std::io;
use std::sync::Arc;

/// Resources that all files of a cache that can be mapped share.
#[derive(Debug)]
pub(crate) struct MapResources {
    features: Features,
    unmap_batch_folios: usize,
    made: Mutex<Made>,
}

#[derive(Debug, Default)]
struct Made {
    regions: Option<Arc<Regions>>,
    threads: Option<FaultThreads>,
}

impl MapResources {
    pub(crate) fn new(features: &Features, unmap_batch_folios: usize) -> Self {
        Self { features: features.clone(), unmap_batch_folios, made: Mutex::default() }
    }

    /// Creates a region for a file of at most `len_max_bytes` bytes.
    ///
    /// # Errors
    /// The kernel has no userfaultfd, or address space, a thread, or memory cannot be allocated.
    pub(crate) fn new_region(&self, reclaim: &Reclaim, len_max_bytes: u64) -> Result<Region> {
        if let Some(reason) = self.features.why_not(Feature::UserFaults) {
            return Err(Error::cannot_map("", &reason));
        }
        let mut made = self.made.lock();
        let regions = self.regions(&mut made, reclaim)?;
        let userfault = self.userfault(&mut made, &regions)?;
        let pages = len_max_bytes.div_ceil(PAGE_BYTES).max(1);
        Region::new(pages, &userfault, &regions).map_err(refused)
    }

    fn regions(&self, made: &mut Made, reclaim: &Reclaim) -> Result<Arc<Regions>> {
        if let Some(regions) = &made.regions {
            return Ok(Arc::clone(regions));
        }
        let size = reclaim.regions_size(self.unmap_batch_folios);
        reclaim.charge(size.bytes())?;
        let regions = Regions::new(size, &self.features, &reclaim.memory.soundness);
        if regions.is_err() {
            reclaim.memory.arena.uncharge(size.bytes());
        }
        let regions = Arc::new(regions.map_err(refused)?);
        made.regions = Some(Arc::clone(&regions));
        Ok(regions)
    }

    fn userfault(&self, made: &mut Made, regions: &Arc<Regions>) -> Result<Arc<Userfault>> {
        if let Some(threads) = &made.threads {
            return Ok(Arc::clone(threads.userfault()));
        }
        let userfault = Arc::new(Userfault::open(&self.features).map_err(refused)?);
        let threads = FaultThreads::start(&userfault, regions).map_err(Error::thread)?;
        made.threads = Some(threads);
        Ok(userfault)
    }
}

fn refused(source: io::Error) -> Error {
    Error::memory("a file that can be mapped (OpenOptions::len_max)", source)
}
