//! Pins without a lifetime, of one folio or of the folios of a part of a map.
//!
//! # Safety
//! Returns addresses in frames that are not reused while a reference is held (FRAMES-3).
#![allow(unsafe_code)]

use super::pin::ImmutableFile;
use super::read_with::PageView;
use super::{File, Handle};
use crate::error::Result;
use crate::fill::Locked;
use crate::maps::mappable::MapGuard;
use crate::memory::Memory;
use crate::page::{FolioId, FolioRef, PAGE_BYTES, PAGE_SHIFT, pages_of};
use std::iter;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Pinned bytes without a lifetime: `Send`, `Sync` and `Clone`. Keeps its file handle open.
///
/// From [`PageRef::into_owned`](super::PageRef::into_owned), or from [`Map::pin`](crate::Map::pin):
/// then the bytes may span folios, and the cache cannot be closed while the reference exists, even
/// after the map was dropped.
#[derive(Debug)]
pub struct OwnedPageRef<F = File> {
    handle: Arc<Handle>,
    memory: Arc<Memory>,
    /// Folios of which each is referenced once.
    first: FolioId,
    others: Box<[FolioId]>,
    view: PageView<'static>,
    /// Of a pin of a map. Dropped last: what was written under the pin is dirty by then.
    guard: Option<MapGuard>,
    of: PhantomData<fn() -> F>,
}

// SAFETY: the address is of frames that our counted references keep; any thread may read them.
unsafe impl<F> Send for OwnedPageRef<F> {}
// SAFETY: all methods only read memory that any thread may read.
unsafe impl<F> Sync for OwnedPageRef<F> {}

impl<F> OwnedPageRef<F> {
    fn folios(&self) -> impl Iterator<Item = FolioId> {
        iter::once(self.first).chain(self.others.iter().copied())
    }

    /// Returns `true` in a process that did not create the cache: a forked child.
    pub(crate) fn is_forked(&self) -> bool {
        self.handle.registry.cache_state.is_forked()
    }
}

impl<F> OwnedPageRef<F> {
    /// Takes over the reference to a folio of `file`.
    pub(super) fn new(file: &File, folio: FolioRef<'_>, view: PageView<'_>) -> Self {
        Self {
            handle: Arc::clone(&file.handle),
            memory: Arc::clone(&file.handle.inode.memory),
            first: folio.into_id(),
            others: Box::default(),
            // SAFETY: the counted reference keeps the frame.
            view: unsafe { PageView::new(view.as_ptr(), view.len()) },
            guard: None,
            of: PhantomData,
        }
    }
}

impl OwnedPageRef {
    /// Pins the mapped bytes of `range`, which begin at `start`. Blocks for the device.
    pub(crate) fn of_map(
        file: &File,
        range: Range<u64>,
        start: *const u8,
        guard: MapGuard,
    ) -> Result<Self> {
        file.fill_range(range.clone())?;
        let pin = |index: u64| {
            let page = index * PAGE_BYTES..(index + 1).saturating_mul(PAGE_BYTES);
            file.pin(page.start.max(range.start)..page.end.min(range.end))
        };
        let mut indices = pages_of(&range);
        let first = pin(indices.next().unwrap_or(range.start >> PAGE_SHIFT))?;
        let others = indices.map(pin).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            handle: Arc::clone(&file.handle),
            memory: Arc::clone(&file.handle.inode.memory),
            first: first.into_folio().into_id(),
            others: others.into_iter().map(|pin| pin.into_folio().into_id()).collect(),
            // SAFETY: the counted references keep the pages.
            view: unsafe { PageView::new(start, (range.end - range.start) as usize) },
            guard: Some(guard),
            of: PhantomData,
        })
    }

    /// Marks the pages as stored to through a map, as far as the file still has them. Waits for the
    /// folio locks.
    pub(crate) fn mark_stored(&self) {
        for id in self.folios() {
            let index = self.memory.folios.get(id).index();
            // After a truncation and a growth the page may belong to another folio (REGION-4).
            if let Some(Locked { folio, lock, .. }) = self.handle.fill().find_resident(index) {
                self.handle.inode.mark_stored(&lock, folio.id());
            }
        }
    }
}

impl Deref for OwnedPageRef<ImmutableFile> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: as for `PageRef`; this owns the immutable handle.
        unsafe { std::slice::from_raw_parts(self.view.as_ptr(), self.view.len()) }
    }
}

impl Deref for OwnedPageRef {
    type Target = PageView<'static>;

    #[inline(always)]
    fn deref(&self) -> &PageView<'static> {
        &self.view
    }
}

impl AsRef<[u8]> for OwnedPageRef<ImmutableFile> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<F> Clone for OwnedPageRef<F> {
    fn clone(&self) -> Self {
        let reference = |id: FolioId| {
            // Our own reference keeps the folio allocated, so this fails only when the count
            // overflows. That takes 2^38 references, more than fit in memory.
            self.memory.folios.try_get(id).expect("2^38 references to one folio").into_id()
        };
        Self {
            handle: Arc::clone(&self.handle),
            memory: Arc::clone(&self.memory),
            first: reference(self.first),
            others: self.others.iter().copied().map(reference).collect(),
            // SAFETY: the counted references keep the frames.
            view: unsafe { PageView::new(self.view.as_ptr(), self.view.len()) },
            guard: self.guard.as_ref().map(MapGuard::for_pin),
            of: PhantomData,
        }
    }
}

impl<F> Drop for OwnedPageRef<F> {
    fn drop(&mut self) {
        if self.is_forked() {
            // The references belong to the parent process.
            return;
        }
        for id in self.folios() {
            drop(self.memory.folios.adopt(id));
        }
    }
}
