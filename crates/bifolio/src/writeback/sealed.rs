//! Write-outs of files with a page codec: from copies, which are sealed (`inode/codec.rs`).

use super::batch::{WriteBatch, WriteIo, WriteVictim};
use crate::error::{Error, write_error};
use crate::inode::{Codec, SealedPages};
use crate::page::PAGE_BYTES;
use smallvec::SmallVec;

impl<'a> WriteBatch<'a> {
    /// Starts to write adjacent folios from sealed copies, as many in one transfer as there is
    /// memory for.
    pub(super) fn start_sealed(
        &mut self,
        mut folios: SmallVec<[WriteVictim<'a>; 1]>,
        codec: &Codec,
    ) {
        while !folios.is_empty() {
            let copies = self.memory_for_sealed(&folios, codec);
            let count = (copies.pages() >> self.inode.mapping.order()) as usize;
            let rest = folios.drain(count.min(folios.len())..).collect();
            self.start_copies_of(folios, copies, codec);
            folios = rest;
        }
    }

    /// Seals the bytes of adjacent folios into `copies`, and starts their transfer. If the codec
    /// refuses one of several, each is tried alone.
    fn start_copies_of(
        &mut self,
        folios: SmallVec<[WriteVictim<'a>; 1]>,
        mut copies: SealedPages,
        codec: &Codec,
    ) {
        let inode = self.inode;
        let all = folios.iter().map(|victim| victim.folio.folio());
        let placed = inode.store.place(all, inode.mapping.len_bytes(), &inode.memory.arena);
        let place = match placed {
            Ok((place, _)) => place,
            Err(error) => return self.end(WriteIo::unwritten(folios), Some(error)),
        };
        let starts = folios.iter().map(|victim| victim.start(inode));
        let (position, length) = (place.position_bytes, place.length_bytes);
        let folio_bytes = inode.mapping.folio_bytes();
        match codec.seal(&mut copies, starts, position, length, folio_bytes) {
            Ok(()) => {
                let sealed = Some(copies);
                self.start_at(WriteIo { sealed, place, ..WriteIo::unwritten(folios) });
            }
            // Each is tried alone.
            Err(_) if folios.len() > 1 => {
                inode.store.release(place);
                self.failed.push(WriteIo::unwritten(folios));
            }
            Err(source) => {
                inode.store.release(place);
                let range = position..position + length.max(PAGE_BYTES);
                let error: Error = write_error(inode.name(), range, source);
                self.end(WriteIo::unwritten(folios), Some(error));
            }
        }
    }

    fn memory_for_sealed(&mut self, folios: &[WriteVictim<'a>], codec: &Codec) -> SealedPages {
        let least = 1 << self.inode.mapping.order();
        let pages = folios.len() as u64 * least;
        loop {
            if let Some(copies) = codec.memory_for(pages, least, self.started() == 0) {
                return copies;
            }
            // Our own transfers have the rest, or part of it.
            self.wait_for_some();
        }
    }
}
