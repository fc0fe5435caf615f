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
    use crate::memory::PageSpace;
    use crate::reclaim::Reclaim;
    use crate::sys::probe::Features;
    use std::marker::PhantomData;

    #[derive(Debug)]
    pub(crate) struct MapResources;

    impl MapResources {
        pub(crate) fn new(_: &Features, _: usize) -> Self {
            Self
        }

        pub(crate) fn new_space(
            &self,
            _: &Reclaim,
            _: u64,
            _: Option<FaultMode>,
        ) -> Result<PageSpace> {
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
