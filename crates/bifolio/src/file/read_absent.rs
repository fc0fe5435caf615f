//! Reads of what is not resident, or is being filled or written by somebody.
//!
//! Called by `read.rs` when neither a hit nor a batch of references got a byte. Consecutive absent
//! folios are claimed and leave as one batch of transfers (`batch.rs`); a folio that somebody else
//! has is waited for, on its lock, and copied under it.
//!
//! # Safety
//! Copies out of frames whose lock it holds.
#![allow(unsafe_code)]

use super::access::Access;
use super::batch::{Batch, Delivery};
use super::fill::{ReadIoClaim, Wait};
use super::{File, ReadRequest, faults};
use crate::error::Result;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::stats::Counter;
use crate::sys::copy;

/// The most of one request that is on its way at a time: copies and transfers overlap anyway.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// A read into a map goes through so much memory at a time.
const BOUNCE_BYTES_MAX: usize = 256 << 10;

impl File {
    /// Copies from pages that are not resident, or that somebody is filling or writing: at least
    /// the first of them. Returns 0 at the end of the file.
    pub(super) fn read_absent(
        &self,
        buffer: &mut [u8],
        position: u64,
        ahead: bool,
    ) -> Result<usize> {
        if !faults::is_mapped(buffer) {
            return self.read_absent_locked(buffer, position, ahead);
        }
        let mut bounce = vec![0; buffer.len().min(BOUNCE_BYTES_MAX)];
        let copied = self.read_absent_locked(&mut bounce, position, ahead)?;
        buffer[..copied].copy_from_slice(&bounce[..copied]);
        Ok(copied)
    }

    /// The same; copies to `buffer`, which lies in no map, with folio locks in hand.
    fn read_absent_locked(&self, buffer: &mut [u8], position: u64, ahead: bool) -> Result<usize> {
        let inode = &*self.handle.inode;
        let length = inode.mapping.len_bytes().saturating_sub(position);
        let length = length.min(buffer.len() as u64).min(REQUEST_BYTES_MAX);
        if length == 0 {
            return Ok(0);
        }
        let pages = position >> PAGE_SHIFT..(position + length).div_ceil(PAGE_BYTES);
        let ReadIoClaim::New(run) = self.handle.claim_read_io(pages.clone(), Wait::ForFrames)?
        else {
            // On its way. What comes behind it must not wait until it is here.
            if ahead {
                self.handle.follow_marks(pages);
            }
            return self.read_page_locked(buffer, position);
        };
        let plan = if ahead { self.handle.plan_after_miss(pages.clone()) } else { None };
        let mut request = ReadRequest::new(position, buffer);
        let mut failed = None;
        let first_page = run.first_page();
        let mut deliver = |_, delivery| match delivery {
            Delivery::Folio(locked) => request.take(inode, &locked),
            Delivery::Failed { error, page, folios: 1 } if page == first_page => {
                failed = Some(error);
            }
            // One bad byte fails a whole run: by itself the first folio may be good.
            Delivery::Failed { .. } => {}
        };
        let mut batch = Batch::in_order(inode);
        batch.start(run, 0, &mut deliver);
        if plan.is_some() {
            // Its own transfer first: somebody is waiting for that.
            batch.begin();
            self.handle.read_ahead(plan);
        }
        let rest = batch.add(&self.handle, pages, 0, &mut deliver);
        batch.finish(&mut deliver);
        // What could not be begun is the next call's.
        let _ = rest;
        match (request.done(), failed) {
            (0, Some(error)) => Err(error),
            (0, None) => self.read_page_locked(buffer, position),
            (copied, _) => Ok(copied),
        }
    }

    /// Copies from one page under its folio's lock, filling it if it is not resident. Returns 0 at
    /// the end of the file.
    fn read_page_locked(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        let mapping = &self.handle.inode.mapping;
        let len_before_bytes = mapping.len_bytes();
        if position >= len_before_bytes {
            return Ok(0);
        }
        let found = self.handle.find_folio(position >> PAGE_SHIFT, Access::Read)?;
        #[cfg(all(test, not(loom)))]
        tests::meanwhile();
        if found.as_ref().is_some_and(|locked| locked.was_resident) {
            self.handle.inode.memory.counters.add(Counter::HitSlow, 1);
            let goes_on_in_page =
                self.handle.readahead.continues(position) && position & (PAGE_BYTES - 1) > 0;
            if !goes_on_in_page {
                self.note_use(position >> PAGE_SHIFT, true);
            }
        }
        let in_page = position & (PAGE_BYTES - 1);
        // A page: the length as it is with the lock in hand. A hole: as it was before that was
        // seen, too; an append fills holes before it sets the length.
        let len_bytes = mapping.len_bytes();
        let len_bytes = if found.is_some() { len_bytes } else { len_bytes.min(len_before_bytes) };
        let visible = len_bytes.saturating_sub(position);
        let length = (PAGE_BYTES - in_page).min(visible).min(buffer.len() as u64) as usize;
        let target = &mut buffer[..length];
        let Some(locked) = found else {
            target.fill(0);
            return Ok(length);
        };
        let in_folio = position - locked.lock.index() * PAGE_BYTES;
        let start = self.handle.inode.frame_of(&locked.folio);
        // SAFETY: inside a frame whose lock and reference we hold; nobody writes it now.
        unsafe { copy::copy_out(start.wrapping_add(in_folio as usize), target) };
        Ok(length)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use std::cell::RefCell;

    thread_local! {
        /// What happens between the look for a page and the look at the length.
        static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    pub(super) fn meanwhile() {
        if let Some(action) = MEANWHILE.take() {
            action();
        }
    }

    #[test]
    fn a_hole_is_read_up_to_where_the_file_ended() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("holes").unwrap();
        file.set_len(100).unwrap();
        let other = file.clone();
        MEANWHILE.set(Some(Box::new(move || other.write_all_at(&[7; 100], 100).unwrap())));
        let mut buffer = [1; 300];
        assert_eq!(file.read_page_locked(&mut buffer, 0).unwrap(), 100);
        assert_eq!(file.read_page_locked(&mut buffer, 0).unwrap(), 200);
        assert_eq!((buffer[99], buffer[100]), (0, 7));
    }
}
