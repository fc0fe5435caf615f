//! Demotion: folios that will not be needed go to the tail of the inactive list, and are evicted
//! next, when memory is wanted. As the kernel's `deactivate_file_folio`.

use super::Reclaim;
use crate::page::{BATCH_SLOTS, FolioRef, Lookup, PAGE_BYTES, PAGE_SHIFT};
use crate::sys::process;
use crate::writeback::Inode;
use std::ops::Range;

/// Gathers folios of one file, and moves them a batch at a time. What is not on a list, because it
/// is in a batch or isolated, stays where it is.
#[derive(Debug)]
pub(super) struct Demotion<'a> {
    reclaim: &'a Reclaim,
    inode: &'a Inode,
    folios: Vec<FolioRef<'a>>,
}

impl<'a> Demotion<'a> {
    pub(super) fn new(reclaim: &'a Reclaim, inode: &'a Inode) -> Self {
        Self { reclaim, inode, folios: Vec::with_capacity(BATCH_SLOTS) }
    }

    /// Takes a folio of the file; readers' marks on it are forgotten.
    pub(super) fn add(&mut self, folio: FolioRef<'a>) {
        let _was_used = self.inode.mapping.test_and_clear_referenced(folio.folio());
        self.folios.push(folio);
        if self.folios.len() == BATCH_SLOTS {
            self.flush();
        }
    }

    /// Moves what was gathered, and puts the references.
    pub(super) fn flush(&mut self) {
        if !self.folios.is_empty() {
            let memory = &self.reclaim.memory;
            memory.lru.demote(&memory.folios, &mut self.folios);
        }
    }
}

impl Reclaim {
    /// Demotes what is resident of a range of a file, in bytes. Blocks for nobody's I/O.
    pub(crate) fn demote(&self, inode: &Inode, range: Range<u64>) {
        let memory = &self.memory;
        memory.lru.drain(&memory.folios, process::current_cpu());
        let mut demotion = Demotion::new(self, inode);
        let mut index = range.start >> PAGE_SHIFT;
        let end = range.end.div_ceil(PAGE_BYTES);
        while let Some(found) = inode.mapping.table().next_folio(index).filter(|found| *found < end)
        {
            index = inode.mapping.end_of_unit(found);
            if let Lookup::Folio(folio) = inode.mapping.get_folio(&memory.folios, found) {
                index = folio.folio().index() + folio.folio().pages();
                demotion.add(folio);
            }
        }
        demotion.flush();
    }
}
