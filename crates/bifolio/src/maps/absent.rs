//! Stand-ins for `maps` in a build without the feature of that name: no file can be mapped.
//!
//! Types of which there is then no value hold a [`Never`], so their methods have no body to write.
//! The others do nothing, or what files do that are not mapped.

/// A value that cannot exist.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Never {}

const REASON: &str = "built without the feature `maps`";

pub(crate) mod faults {
    use crate::error::Result;
    use crate::file::Handle;
    use crate::memory::PageSpace;
    use std::ops::Range;
    use std::sync::Arc;

    /// Which threads serve faults: there are none.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct FaultMode;

    pub(crate) fn is_in_region(_: &[u8]) -> bool {
        false
    }

    pub(crate) fn conflict(_: Option<FaultMode>, _: &PageSpace) -> Option<(FaultMode, FaultMode)> {
        None
    }

    pub(crate) fn has_region(_: &PageSpace) -> bool {
        false
    }

    pub(crate) fn enlist(_: &Arc<Handle>) {}

    pub(crate) fn forget(_: &PageSpace) {}

    pub(crate) fn restore(_: &Handle, _: Range<u64>) -> Result<()> {
        Ok(())
    }
}

pub(crate) mod kernel {
    pub(crate) mod trials {
        use crate::sys::probe::{Feature, Finding};

        pub(crate) fn probe(_: Feature) -> Finding {
            Err(super::super::REASON.to_owned())
        }
    }
}

pub(crate) mod mappable {
    use super::{Never, REASON};
    use crate::error::{Error, Result};
    use crate::file::File;
    use crate::inode::Resizing;
    use crate::maps::faults::FaultMode;
    use crate::maps::region::Region;
    use crate::reclaim::Reclaim;
    use crate::sys::probe::Features;
    use std::marker::PhantomData;

    #[derive(Debug)]
    pub(crate) struct MapResources;

    impl MapResources {
        pub(crate) fn new(_: &Features, _: usize) -> Self {
            Self
        }

        pub(crate) fn new_region(
            &self,
            _: &Reclaim,
            _: u64,
            _: Option<FaultMode>,
        ) -> Result<Region> {
            Err(Error::cannot_map("", REASON))
        }
    }

    #[derive(Debug)]
    pub(crate) struct MapGuard(Never);

    impl MapGuard {
        pub(crate) fn for_pin(&self) -> Self {
            match self.0 {}
        }
    }

    #[derive(Debug)]
    pub(crate) struct Growing<'a>(PhantomData<&'a File>);

    impl Growing<'_> {
        pub(crate) fn end(&mut self) {}
    }

    impl File {
        pub(crate) fn uncover(&self, _: &Resizing<'_>, _: u64) -> Result<Growing<'_>> {
            Ok(Growing(PhantomData))
        }
    }
}

pub(crate) mod pages {
    use crate::error::{Error, Result};
    use crate::inode::{Inode, NoRoom};
    use crate::page::{FolioRef, LockedFolio};

    #[derive(Clone, Copy, Debug)]
    pub(crate) enum PinnedPages {
        Kept,
        Zeroed,
    }

    #[derive(Debug)]
    pub(crate) struct Removal<'a>(&'a Inode);

    impl<'a> Removal<'a> {
        pub(crate) fn new(inode: &'a Inode, _: PinnedPages) -> Self {
            Self(inode)
        }

        pub(crate) fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
            self.0.unlink(folio, locked);
        }

        pub(crate) fn finish(&mut self) {}
    }

    impl Inode {
        pub(crate) fn install_page(
            &self,
            _: &LockedFolio<'_>,
            _: &[u8],
            _: bool,
        ) -> Option<Result<()>> {
            None
        }

        pub(crate) fn write_page<E: From<NoRoom> + From<Error>>(
            &self,
            _: &FolioRef<'_>,
            _: &LockedFolio<'_>,
            _: &[u8],
        ) -> std::result::Result<bool, E> {
            Ok(false)
        }
    }
}

pub(crate) mod region {
    use super::Never;
    use crate::memory::{Arena, Budget};
    use crate::page::{FolioId, Folios};
    use crate::sync::Share;
    use std::io;
    use std::ops::Range;

    #[derive(Debug)]
    pub(crate) struct Region {
        pub(crate) addresses: Never,
        pub(crate) stray_pages: Never,
        pub(crate) mapped: Never,
    }

    impl Region {
        pub(crate) const PAGES_IN_FLIGHT: u64 = 0;

        pub(crate) fn window_pages(&self) -> u64 {
            match self.addresses {}
        }

        pub(crate) fn stage(&self, _: usize, _: &Share, _: bool) -> Option<Staged> {
            match self.addresses {}
        }

        pub(crate) fn publish(
            &self,
            _: &Staged,
            _: usize,
            _: Range<u64>,
            _: bool,
        ) -> (u64, io::Result<()>) {
            match self.addresses {}
        }
    }

    /// The addresses, stray pages and maps of a region.
    impl Never {
        pub(crate) fn base(&self) -> *mut u8 {
            match *self {}
        }

        pub(crate) fn address(&self, _: u64) -> *mut u8 {
            match *self {}
        }

        pub(crate) fn clear_poison(&self, _: &Self, _: Range<u64>) -> io::Result<()> {
            match *self {}
        }

        pub(crate) fn end_growth(&self) {
            match *self {}
        }

        pub(crate) fn orphaned_among(&self, _: Range<u64>) -> Vec<u64> {
            match *self {}
        }

        pub(crate) fn among(&self, _: &Range<u64>) -> Vec<Range<u64>> {
            match *self {}
        }
    }

    #[derive(Debug)]
    pub(crate) struct Staged(Never);

    impl Staged {
        pub(crate) fn pages(&self) -> usize {
            match self.0 {}
        }

        pub(crate) fn address(&self, _: usize) -> *mut u8 {
            match self.0 {}
        }

        pub(crate) fn extend(&mut self, _: usize) {
            match self.0 {}
        }

        pub(crate) fn shrink(&mut self, _: usize) {
            match self.0 {}
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Orphans;

    impl Orphans {
        pub(crate) fn release(&self, _: FolioId) {}
    }

    #[derive(Debug)]
    pub(crate) struct RecentReads;

    impl RecentReads {
        pub(crate) fn new(_: &Arena) -> Self {
            Self
        }

        pub(crate) fn note_read(&self, _: u64) {}

        pub(crate) fn are_single(&self) -> bool {
            false
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct RegionPages {
        pub(crate) used: u64,
    }

    impl RegionPages {
        pub(crate) fn take(&mut self, _: &mut Budget, _: u32, _: &Folios) -> Option<FolioId> {
            None
        }

        pub(crate) fn descriptor_bytes(&self) -> u64 {
            0
        }

        pub(crate) fn give_back(&mut self, _: &mut Budget, _: FolioId, _: &Folios) {}
    }
}

pub(crate) mod stores {
    use super::Never;
    use crate::error::Result;
    use crate::inode::Inode;
    use crate::writeback::{WriteBatch, WriteVictim};
    use smallvec::SmallVec;
    use std::ops::Range;

    #[derive(Debug)]
    pub(crate) struct WriteCopies(Never);

    impl WriteCopies {
        pub(crate) fn address(&self, _: usize) -> *mut u8 {
            match self.0 {}
        }
    }

    impl<'a> WriteBatch<'a> {
        pub(crate) fn start_copied(
            &mut self,
            folios: SmallVec<[WriteVictim<'a>; 1]>,
        ) -> Option<SmallVec<[WriteVictim<'a>; 1]>> {
            Some(folios)
        }
    }

    impl Inode {
        pub(crate) fn find_stores(&self, _: &Range<u64>, _: bool) -> Result<bool> {
            Ok(false)
        }
    }
}

pub(crate) mod unmap {
    use crate::inode::Inode;
    use crate::page::FolioRef;
    use crate::reclaim::{Reclaim, ReclaimLock, ScanControl, ScanCounts, Unswapped};
    use std::marker::PhantomData;
    use std::sync::Arc;

    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Owners<'t> {
        ReclaimLock(&'t ReclaimLock<'t>),
    }

    #[derive(Debug)]
    pub(crate) struct Unmapping<'t>(PhantomData<&'t Reclaim>);

    impl<'t> Unmapping<'t> {
        pub(crate) fn new(_: &'t Reclaim, _: Owners<'t>, _: ScanControl) -> Self {
            Self(PhantomData)
        }

        pub(crate) fn scan_pages(&self) -> u64 {
            0
        }

        pub(crate) fn collect(
            &mut self,
            _: &mut Vec<FolioRef<'t>>,
            _: &mut Unswapped<'t>,
            _: &mut ScanCounts,
        ) {
        }

        pub(crate) fn add_all(&mut self, _: &mut Vec<FolioRef<'t>>, _: &mut ScanCounts) {}

        pub(crate) fn finish(self, _: &mut ScanCounts) {}
    }

    pub(crate) fn swap_out_mapped(_: &Reclaim, _: &mut Vec<(Arc<Inode>, FolioRef<'_>)>) {}
}
