//! Locked folios: of one thread ([`Locked`]), and of a run whose bytes are on their way, on
//! whatever thread it is ([`HeldFolios`]).

use crate::page::{Flag, FolioId, FolioRef, Folios, LockedFolio};
use smallvec::SmallVec;

/// Locked folio, with a reference. The lock is released before the reference: a pattern that takes
/// it apart names `folio` first, because the last name of a pattern is dropped first.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    pub(crate) lock: LockedFolio<'a>,
    pub(crate) folio: FolioRef<'a>,
    /// Set if the folio was resident before the lookup.
    pub(crate) was_resident: bool,
}

impl<'a> Locked<'a> {
    pub(crate) fn is_uptodate(&self) -> bool {
        self.lock.flags.get(Flag::Uptodate)
    }

    /// Keeps the folio locked and referenced, for [`Locked::adopt`] on any thread.
    pub(crate) fn detach(self) -> FolioId {
        self.lock.detach_lock();
        self.folio.into_id()
    }

    /// Takes over the lock and the reference from [`Locked::detach`].
    pub(crate) fn adopt(folios: &'a Folios, id: FolioId) -> Self {
        let folio = folios.adopt(id);
        Self { lock: folio.adopt_lock(), folio, was_resident: false }
    }
}

/// Folios in the order of their pages, of which this value has the lock and a reference each, until
/// [`Self::take_next`] hands those out. A run takes all before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct HeldFolios {
    ids: SmallVec<[FolioId; 1]>,
    /// Number of folios that were taken.
    taken: usize,
}

impl HeldFolios {
    /// Takes over the lock and the reference of a folio.
    pub(super) fn push(&mut self, locked: Locked<'_>) {
        debug_assert_eq!(self.taken, 0, "no folio joins a run that is being published");
        self.ids.push(locked.detach());
    }

    /// Returns the folios, also those that were taken.
    pub(crate) fn ids(&self) -> &[FolioId] {
        &self.ids
    }

    /// Returns the number of folios, also of those that were taken.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Hands out the next folio.
    pub(super) fn take_next<'a>(&mut self, folios: &'a Folios) -> Option<Locked<'a>> {
        let id = *self.ids.get(self.taken)?;
        // First: a panic of what uses the folio must not release it twice.
        self.taken += 1;
        Some(Locked::adopt(folios, id))
    }

    /// Looks at the folio with a number, which was not taken.
    pub(super) fn look<R>(
        &self,
        folios: &Folios,
        number: usize,
        look: impl FnOnce(&Locked<'_>) -> R,
    ) -> R {
        debug_assert!(number >= self.taken, "{number} of {self:?} is another owner's");
        let locked = Locked::adopt(folios, self.ids[number]);
        let seen = look(&locked);
        let _still_locked = locked.detach();
        seen
    }
}
