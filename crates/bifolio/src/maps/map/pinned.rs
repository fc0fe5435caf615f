//! Pins of maps: bytes that stay resident, and bytes that the kernel or a device writes.
//!
//! The cache finds a program's stores in the page tables. It does not find stores of a direct
//! transfer or a device there: the transfer looked up the page when it began, and its bytes may
//! arrive after a write-out has made the page clean. So every look for stores counts the pages of a
//! [`MapPinMut`] as stored to, and dropping it marks them dirty once more.
//!
//! PROTOCOL PINNED, as two columns:
//!
//! ```text
//!  PIN (here)                                   OTHERS
//!  P1 a reference to each folio                 eviction: UNMAP-B2 fails
//!  P2 its pages count as stored to              sync: look for stores; pinned pages are among
//!  P3 mark them dirty, under the folio lock       them; then SYNC-S1..S5
//!  P4 (the device writes, until it ends)        write-out: clean, protect, copy
//!  P5 mark them dirty, under the lock of        truncate: the folio is removed from the table,
//!     the folio that has the page now             the page stays (REGION-4); growth: another
//!  P6 they no longer count as stored to           folio has the page, zeroed
//!  P7 drop the references
//! ```
//!
//! A sync writes everything that was written before its look for stores: the page counts as stored
//! to, or P5 has marked it dirty. Bytes that arrive after the copy for a write-out are found by the
//! next look, or by P5. Bytes that a device writes to a truncated page are lost, as with `mmap`; if
//! the file has grown again they may become part of it, and are not lost then. `loom_map_pin`
//! models this.
//!
//! A pin may outlive its map, and then counts as one: the cache cannot be closed before P7.

use crate::file::OwnedPageRef;
use crate::maps::region::Region;
use crate::page::pages_of;
use std::ops::Range;
use std::sync::Arc;

/// Lets the kernel or a device write to bytes of a map while it exists; see
/// [`MapMut::pin_mut`](crate::MapMut::pin_mut).
///
/// The pages stay resident and count as stored to: each sync, and the flusher, writes them with
/// their current content. Dropping the pin marks them dirty. Until then the file stays open and the
/// cache cannot be closed, even after the map is dropped. The pin may be sent to the thread that
/// learns of the end of the transfer, and dropped there. Dropping it waits for a thread that holds
/// the lock of one of the pages ([`PageRefMut`](crate::PageRefMut)).
#[derive(Debug)]
pub struct MapPinMut {
    page: OwnedPageRef,
    region: Arc<Region>,
    range: Range<u64>,
}

impl MapPinMut {
    /// Counts the pages of `range`, a range of the file that `page` pins, as stored to.
    pub(super) fn new(page: OwnedPageRef, region: &Arc<Region>, range: Range<u64>) -> Self {
        region.written_unseen.add(pages_of(&range));
        page.mark_stored();
        Self { page, region: Arc::clone(region), range }
    }

    /// Returns the address of the first byte, for the kernel or the device to write to.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.region.base().wrapping_add(self.range.start as usize)
    }
}

impl Drop for MapPinMut {
    fn drop(&mut self) {
        // In a forked child, locks may be held by threads that do not exist there.
        if self.page.is_forked() {
            return;
        }
        self.page.mark_stored();
        self.region.written_unseen.remove(&pages_of(&self.range));
    }
}
