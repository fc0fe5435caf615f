//! Copies of pages that are on their way to the device while raw writers may store to them.
//!
//! A backing is promised bytes that do not change during a write, and a store through a map waits
//! for nobody. So pages of a file that is mapped for writing are written from copies:
//!
//! ```text
//!   protect the pages --> copy them --> one transfer, from the copies --> give the copies back
//! ```
//!
//! In this order: what is stored after the protection is found again and makes the page dirty once
//! more, whether the copy has it or not; and what was stored before is in the copy.
//!
//! The copies are in staging memory (`memory/region/staging.rs`), which has no more than a half of
//! itself for them, so that a device that answers no write holds up no read. Nobody waits for it
//! (IO-5): a transfer takes fewer pages, or waits for others of its own batch; and while others
//! have all there is, a batch writes one page at a time, from memory of its own.
//!
//! # Safety
//! Turns its share of the staging memory into slices.
#![allow(unsafe_code)]

use super::batch::{WriteBatch, WriteVictim};
use super::inode::Inode;
use crate::memory::{Region, Staged};
use crate::page::PAGE_BYTES;
use crate::sys::copy;
use smallvec::SmallVec;
use std::cell::UnsafeCell;

/// A transfer of fewer pages is not worth its costs, if some more are to be had soon.
const PAGES_MIN: usize = 64;

/// Copies of neighbours, in order.
#[derive(Debug)]
pub(super) struct Copies {
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Staged(Staged),
    Own(Box<OwnPage>),
}

/// Memory for one page.
#[derive(Debug)]
#[repr(align(4096))]
struct OwnPage(UnsafeCell<[u8; PAGE_BYTES as usize]>);

impl Copies {
    fn own_page() -> Self {
        let page = OwnPage(UnsafeCell::new([0; PAGE_BYTES as usize]));
        Self { memory: Memory::Own(Box::new(page)) }
    }

    fn pages(&self) -> usize {
        match &self.memory {
            Memory::Staged(staged) => staged.pages(),
            Memory::Own(_) => 1,
        }
    }

    /// Address of one of them; the others follow.
    pub(super) fn address(&self, page: usize) -> *mut u8 {
        match &self.memory {
            Memory::Staged(staged) => staged.address(page),
            Memory::Own(own) => own.0.get().cast(),
        }
    }

    /// Makes the copies.
    fn fill(&mut self, folios: &[WriteVictim<'_>], inode: &Inode) {
        for (page, leaving) in folios.iter().enumerate() {
            let (source, target) = (leaving.start(inode), self.address(page));
            // SAFETY: a page of the memory that this has, and only this; nothing is in flight.
            let target = unsafe { std::slice::from_raw_parts_mut(target, PAGE_BYTES as usize) };
            // SAFETY: the page of a folio that is uptodate is there while the reference to it is
            // (REGION-1, REGION-4); the target is no part of a region.
            unsafe { copy::copy_out(source, target) };
        }
    }
}

impl<'a> WriteBatch<'a> {
    /// The region that `folios` are in, if they may be stored to while they are written.
    pub(super) fn needs_copies(&self, folios: &[WriteVictim<'_>]) -> Option<&'a Region> {
        // Seen after the write-outs have begun: one that misses it is waited for before anybody
        // stores (`Inode::track_stores`). Those that are leaving are copies.
        let region = self.inode.page_space.tracked()?;
        folios[0].copy.is_none().then_some(region)
    }

    /// Starts to write neighbours from copies, as many in one transfer as there is memory for.
    pub(super) fn start_copied(
        &mut self,
        mut folios: SmallVec<[WriteVictim<'a>; 1]>,
        region: &'a Region,
    ) {
        debug_assert_eq!(self.inode.mapping.order(), 0, "a folio of a region is a page");
        while !folios.is_empty() {
            let mut copies = self.memory_for_copies(folios.len(), region);
            let rest = folios.drain(copies.pages()..).collect();
            let first = folios[0].folio.folio().index();
            if let Err(error) = region.protect(first..first + folios.len() as u64) {
                // They count as stored to, and will be written once more.
                log::warn!("{}: stores cannot be watched: {error}", self.inode.name());
            }
            copies.fill(&folios, self.inode);
            self.start_from(folios, Some(copies));
            folios = rest;
        }
    }

    /// Memory for the copies of up to `pages` pages, one at least.
    fn memory_for_copies(&mut self, pages: usize, region: &Region) -> Copies {
        let staging = &region.regions.staging;
        loop {
            let is_alone = self.started() == 0;
            match staging.try_take_for_copies(pages, &self.inode.load.staging) {
                Some(staged) if is_alone || staged.pages() >= pages.min(PAGES_MIN) => {
                    return Copies { memory: Memory::Staged(staged) };
                }
                None if is_alone => return Copies::own_page(),
                // Our own transfers have the rest, or some of it.
                _ => self.wait_for_some(),
            }
        }
    }
}
