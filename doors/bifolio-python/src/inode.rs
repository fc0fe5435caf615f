//! State of a file that all its handles in a cache share: which rows its header counts, and what
//! must still reach it.
//!
//! A `.npy` file that grows has rows which its header does not count yet. They are state of the
//! file, not of the array object that appended them: whichever handle syncs or closes the file
//! next, the end of the cache, or the end of the interpreter, writes the header.
//!
//! Invariants:
//! - A header is written only for rows that a sync made durable before, so no reader finds a header
//!   without its rows, even after a loss of power.
//! - A header never replaces one that counts more rows, unless the file was truncated between.
//! - `epoch` changes whenever the file is created anew or loses counted rows: an array of before
//!   cannot append any more, and a header that was about to be written is not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use bifolio::{ErrorKind, File};
use pyo3::pyfunction;

use crate::error::{Failure, Result};

/// First bytes of a `.npy` file.
const NPY_MAGIC: &[u8; 6] = b"\x93NUMPY";

/// `true` once the interpreter ends: from then on each write is also passed to the kernel.
static WRITES_THROUGH: AtomicBool = AtomicBool::new(false);

/// Makes each write from now on reach the kernel before its call returns.
#[pyfunction]
pub(crate) fn write_through() {
    // Relaxed: a flag without data; the calls that must see it are made by this thread.
    WRITES_THROUGH.store(true, Ordering::Relaxed);
}

/// Passes the writes of `file` to the kernel if the interpreter is about to end.
pub(crate) fn pass_on_at_end(file: &File) -> bifolio::Result<()> {
    // Relaxed: as in `write_through`.
    if WRITES_THROUGH.load(Ordering::Relaxed) { write_back(file) } else { Ok(()) }
}

/// Makes all writes to `file` durable. Fails only for what is not, as [`write_back`] does.
fn sync_all(file: &File) -> bifolio::Result<()> {
    unless_stored(|| file.sync_all())
}

/// Passes all writes to `file` to the kernel, and waits for it.
///
/// # Errors
/// Something is not in the kernel. That an earlier attempt failed, in the background or by another
/// handle, is none: a page that could not be written stays dirty, and this call writes it.
pub(crate) fn write_back(file: &File) -> bifolio::Result<()> {
    unless_stored(|| file.write_back(0..file.len()))
}

/// Makes a call that stores all writes of a file, and fails only if some are still not stored.
///
/// The cache tells each handle once of a failed write-back, although the call writes the page now.
/// The second call is told only of what it could not write itself. A failed flush is never taken
/// back by another call: the file stays failed (IO-4 of the library).
fn unless_stored(call: impl Fn() -> bifolio::Result<()>) -> bifolio::Result<()> {
    match call() {
        Err(error) if error.kind() == ErrorKind::Writeback => call(),
        done => done,
    }
}

/// The text of a `.npy` header around the number of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) before: Vec<u8>,
    pub(crate) after: Vec<u8>,
    /// Length of the whole header, bytes.
    pub(crate) bytes: usize,
}

impl Header {
    /// Returns the header for a number of rows; `None` if there is no room for its digits.
    fn encode(&self, rows: u64) -> Option<Vec<u8>> {
        let digits = rows.to_string();
        let used = self.before.len() + digits.len() + self.after.len() + 1;
        let padding = self.bytes.checked_sub(used)?;
        let mut header = Vec::with_capacity(self.bytes);
        header.extend_from_slice(&self.before);
        header.extend_from_slice(digits.as_bytes());
        header.extend_from_slice(&self.after);
        header.resize(header.len() + padding, b' ');
        header.push(b'\n');
        Some(header)
    }
}

/// Where the rows of an array are in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Position of the first row, bytes.
    pub(crate) base: u64,
    pub(crate) row_bytes: u64,
    /// `None` for a file without a header.
    pub(crate) header: Option<Header>,
}

impl Layout {
    fn end(&self, rows: u64) -> Option<u64> {
        self.row_bytes.checked_mul(rows)?.checked_add(self.base)
    }
}

/// Rows of the array that grows in a file.
#[derive(Debug)]
struct Table {
    layout: Layout,
    /// Rows of the array.
    rows: u64,
    /// Rows that the header in the cache counts.
    rows_counted: u64,
    /// `true` if bytes of an append that failed may be past the end of the rows.
    has_tail: bool,
}

#[derive(Debug, Default)]
struct Rows {
    epoch: u64,
    /// `None` until an array appends.
    table: Option<Table>,
}

/// A header that a sync will write, once the rows are durable.
#[derive(Clone, Copy, Debug)]
struct Due {
    epoch: u64,
    rows: u64,
}

impl Rows {
    fn due(&self) -> Option<Due> {
        let table = self.table.as_ref()?;
        let is_due = table.layout.header.is_some() && table.rows > table.rows_counted;
        is_due.then_some(Due { epoch: self.epoch, rows: table.rows })
    }

    fn write_header(&mut self, file: &File, due: Due) -> Result<()> {
        let Some(table) = self.table.as_mut().filter(|_| self.epoch == due.epoch) else {
            return Ok(());
        };
        let has_rows = table.layout.end(due.rows).is_some_and(|end| file.len() >= end);
        if table.rows_counted >= due.rows || !has_rows {
            return Ok(());
        }
        let header = table.layout.header.as_ref().and_then(|header| header.encode(due.rows));
        if let Some(header) = header {
            file.write_all_at(&header, 0)?;
        }
        table.rows_counted = due.rows;
        Ok(())
    }

    /// Makes all writes durable, then the header of the rows that there were before.
    fn sync(&mut self, file: &File) -> Result<()> {
        let due = self.due();
        sync_all(file)?;
        if let Some(due) = due {
            self.write_header(file, due)?;
            sync_all(file)?;
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.epoch += 1;
        self.table = None;
    }
}

/// The rows of one append.
#[derive(Debug)]
pub(crate) struct Append<'a> {
    pub(crate) layout: Layout,
    /// Rows that the array has as far as its object knows; taken if no array grew in the file yet.
    pub(crate) rows: u64,
    pub(crate) epoch: u64,
    pub(crate) rows_added: u64,
    pub(crate) bytes: &'a [u8],
}

/// The state of a file that its handles share.
#[derive(Debug, Default)]
pub(crate) struct Inode {
    rows: Mutex<Rows>,
    /// A clone of the first handle that may write.
    writer: OnceLock<File>,
    /// `true` while a close has failed and no sync has succeeded since: the file then stays open in
    /// the cache, which tries again.
    is_kept: AtomicBool,
}

/// An inode that no other thread can append to.
#[derive(Debug)]
pub(crate) struct Frozen<'a> {
    inode: &'a Inode,
    rows: MutexGuard<'a, Rows>,
}

impl Inode {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a handle that may write.
    pub(crate) fn note_writer(&self, file: &File) {
        self.writer.get_or_init(|| file.clone());
    }

    /// Returns a handle that may write, if there is one.
    pub(crate) fn writer(&self) -> Option<&File> {
        self.writer.get()
    }

    /// Returns `true` if the file stays open in the cache although its handles are closed.
    pub(crate) fn is_kept(&self) -> bool {
        // Acquire: pairs with the Releases in `keep` and `sync`; only the value counts.
        self.is_kept.load(Ordering::Acquire)
    }

    /// Keeps the file open until a sync succeeds.
    pub(crate) fn keep(&self) {
        // Release: pairs with the Acquire in `is_kept`.
        self.is_kept.store(true, Ordering::Release);
    }

    /// Returns `true` if the header counts fewer rows than there are.
    pub(crate) fn has_due_header(&self) -> bool {
        self.rows().due().is_some()
    }

    /// Returns the number that changes when the file is created anew or truncated.
    pub(crate) fn epoch(&self) -> u64 {
        self.rows().epoch
    }

    /// Returns the rows of the array that grows in the file, if it is one of this layout.
    pub(crate) fn rows_of(&self, base: u64, row_bytes: u64) -> Option<u64> {
        let rows = self.rows();
        let table = rows.table.as_ref()?;
        let is_same = (table.layout.base, table.layout.row_bytes) == (base, row_bytes);
        is_same.then_some(table.rows)
    }

    /// Makes everything durable that was written before the call, also a header for its rows.
    pub(crate) fn sync(&self, file: &File) -> Result<()> {
        // The rows come first, and the lock is not held meanwhile: appends go on.
        let due = self.rows().due();
        sync_all(file)?;
        if let Some(due) = due {
            self.rows().write_header(file, due)?;
            sync_all(file)?;
        }
        // Release: as in `keep`.
        self.is_kept.store(false, Ordering::Release);
        Ok(())
    }

    /// Keeps other threads from appending.
    pub(crate) fn freeze(&self) -> Frozen<'_> {
        Frozen { inode: self, rows: self.rows() }
    }

    /// Passes all writes to the kernel, in a fork.
    pub(crate) fn pass_on(&self) -> Result<()> {
        Ok(self.writer().map_or(Ok(()), write_back)?)
    }

    /// Changes the length. Counted rows that are lost end the growth of their array.
    pub(crate) fn set_len(&self, file: &File, bytes: u64) -> Result<()> {
        let mut rows = self.rows();
        file.set_len(bytes)?;
        let end = rows.table.as_ref().map(|table| table.layout.end(table.rows));
        if end.is_some_and(|end| end.is_none_or(|end| bytes < end)) {
            rows.forget();
        }
        Ok(())
    }

    /// Makes the file one of zeros of this length that starts with `head`, in place of all that it
    /// was, and passes it to the kernel.
    pub(crate) fn create(&self, file: &File, head: &[u8], bytes: u64) -> Result<()> {
        let mut rows = self.rows();
        rows.forget();
        file.set_len(0)?;
        file.write_all_at(head, 0)?;
        file.set_len(bytes)?;
        drop(rows);
        Ok(write_back(file)?)
    }

    /// Appends rows to an array. Returns its new number of rows.
    ///
    /// # Errors
    /// The file has its old length then. If the storage refuses that, too, the next append cuts it.
    pub(crate) fn append(&self, file: &File, append: &Append<'_>, name: &str) -> Result<u64> {
        let refuse = |problem: String| Err(Failure::Value(format!("{name} {problem}")));
        let mut rows = self.rows();
        if rows.epoch != append.epoch {
            return refuse("was created anew or truncated since this array was opened".to_owned());
        }
        let layout = &append.layout;
        let table = rows.table.get_or_insert_with(|| Table {
            layout: layout.clone(),
            rows: append.rows,
            rows_counted: append.rows,
            has_tail: false,
        });
        if table.layout != *layout {
            return refuse("has another array that grows, with other rows".to_owned());
        }
        let rows_after = table.rows.checked_add(append.rows_added);
        let ends = (layout.end(table.rows), rows_after.and_then(|rows| layout.end(rows)));
        let (Some(rows_after), (Some(end), Some(_))) = (rows_after, ends) else {
            return refuse("cannot have that many rows".to_owned());
        };
        if layout.header.as_ref().is_some_and(|header| header.encode(rows_after).is_none()) {
            return refuse(format!(
                "has a header without room for {rows_after} rows; write the array with numpy 1.23 \
                 or later, whose headers have room"
            ));
        }
        cut_tail(file, table, end, name)?;
        if let Err(error) = file.write_all_at(append.bytes, end) {
            table.has_tail = file.len() > end && file.set_len(end).is_err();
            return Err(error.into());
        }
        table.rows = rows_after;
        Ok(rows_after)
    }

    /// Cuts what follows the rows that the header counts. Returns the number of bytes.
    pub(crate) fn cut(&self, file: &File, end: u64) -> Result<u64> {
        let _rows = self.rows();
        let bytes = file.len().saturating_sub(end);
        if bytes > 0 {
            file.set_len(end)?;
        }
        Ok(bytes)
    }
}

/// Makes the file end with the rows of its array: rows of a program that died before its flush, and
/// parts of an append that failed, are not counted by the header.
fn cut_tail(file: &File, table: &Table, end: u64, name: &str) -> Result<()> {
    let length = file.len();
    let refuse = |advice: &str| {
        let text = format!("{name} is {length} bytes long, but the array ends at {end}{advice}");
        Err(Failure::Value(text))
    };
    if length == end {
        return Ok(());
    }
    if length < end {
        return refuse("");
    }
    if table.layout.header.is_none() && !table.has_tail {
        return refuse(": truncate the file to append there");
    }
    let mut magic = [0; NPY_MAGIC.len()];
    let is_whole = length - end >= magic.len() as u64;
    if is_whole && file.read_exact_at(&mut magic, end).is_ok() && magic == *NPY_MAGIC {
        return refuse(", where another array follows: open_array(.., repair=True) removes it");
    }
    Ok(file.set_len(end)?)
}

impl Frozen<'_> {
    /// Makes everything durable that was written, also the header.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let Some(file) = self.inode.writer() else { return Ok(()) };
        self.rows.sync(file)?;
        // Release: pairs with the Acquire in `is_kept`.
        self.inode.is_kept.store(false, Ordering::Release);
        Ok(())
    }

    /// Returns `true` if a header is due.
    pub(crate) fn has_due_header(&self) -> bool {
        self.rows.due().is_some()
    }
}
