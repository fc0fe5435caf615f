//! The writer of one segment file.

use std::io::{self, Write};

use bifolio::File;
use tantivy::directory::{AntiCallToken, TerminatingWrite};

/// Appends to a new file. tantivy buffers before it.
pub(crate) struct SegmentWriter {
    file: File,
    position: u64,
    is_durable: bool,
}

impl SegmentWriter {
    /// Makes a writer of an empty file.
    pub(crate) fn new(file: File) -> Self {
        Self { file, position: 0, is_durable: false }
    }
}

impl Write for SegmentWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(bytes, self.position)?;
        self.position += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TerminatingWrite for SegmentWriter {
    fn terminate_ref(&mut self, _: AntiCallToken) -> io::Result<()> {
        self.file.sync_data()?;
        self.is_durable = true;
        Ok(())
    }
}

impl Drop for SegmentWriter {
    fn drop(&mut self) {
        if !self.is_durable {
            // No commit has the file: on a full disk its pages would stay dirty for good.
            let _ = self.file.discard_dirty();
        }
    }
}
