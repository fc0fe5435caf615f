//! A main database as the system's VFS has it open. It is never locked there:
//! [`FileLock`](crate::file_lock::FileLock) is. Of an exclusive database, it creates the file, and
//! serves calls before the first lock. Of a shared one, each connection has its own, for writes.
//!
//! The system's VFS does not close a descriptor while it holds locks of its inode, whichever of its
//! files they belong to, so opening and closing one of these drops no lock of other connections
//! through it.
//!
//! # Safety
//! The memory and the name live as long as the file. The system's VFS lets any thread call, one at
//! a time.
#![allow(unsafe_code)]

use crate::name::FileName;
use crate::sqlite::{self, File, IoMethods, Vfs};
use std::ffi::{c_int, c_void};
use std::ptr;

/// A result with SQLite's code as the error.
pub(crate) type Answer<T = ()> = Result<T, c_int>;

/// An open file of the system's VFS.
pub(crate) struct SystemFile {
    /// Memory of the file, as long as its VFS asks for.
    memory: Box<[u64]>,
    /// The VFS keeps a pointer to it.
    _name: FileName,
}

impl SystemFile {
    /// Opens a file with `flags`, and returns the flags that SQLite is to be told.
    ///
    /// # Safety
    /// `vfs` is registered.
    pub(crate) unsafe fn open(
        vfs: *mut Vfs,
        name: FileName,
        flags: c_int,
    ) -> Answer<(Self, c_int)> {
        // SAFETY: registered VFSs live as long as the library.
        let Vfs { file_size, open, .. } = unsafe { *vfs };
        let bytes = usize::try_from(file_size).map_err(|_| sqlite::ERROR)?;
        let memory = vec![0; bytes.div_ceil(size_of::<u64>())].into_boxed_slice();
        let mut file = Self { memory, _name: name };
        let mut flags_found = flags;
        let (name, pointer) = (file._name.as_ptr(), file.pointer());
        // SAFETY: a name with its parameters, zeroed memory of the length asked for, a variable.
        check(unsafe { open(vfs, name, pointer, flags, &mut flags_found) })?;
        Ok((file, flags_found))
    }

    fn pointer(&mut self) -> *mut File {
        self.memory.as_mut_ptr().cast()
    }

    /// Functions of the file; `None` if it is not open.
    fn methods(&self) -> Option<&IoMethods> {
        // SAFETY: the memory begins with the pointer to them.
        let methods = unsafe { self.memory.as_ptr().cast::<File>().read() }.methods;
        // SAFETY: null, or the table of an open file.
        unsafe { methods.as_ref() }
    }

    fn open_methods(&self) -> &IoMethods {
        self.methods().expect("the file is open")
    }

    /// Reads as `xRead`: what the file does not have is zeros, and `SQLITE_IOERR_SHORT_READ`.
    pub(crate) fn read(&mut self, buffer: &mut [u8], position: u64) -> Answer {
        let read = self.open_methods().read;
        let length = c_int::try_from(buffer.len()).map_err(|_| sqlite::IOERR_READ)?;
        let offset = i64::try_from(position).map_err(|_| sqlite::IOERR_READ)?;
        // SAFETY: an open file and a buffer.
        check(unsafe { read(self.pointer(), buffer.as_mut_ptr().cast(), length, offset) })
    }

    pub(crate) fn write(&mut self, buffer: &[u8], position: u64) -> Answer {
        let write = self.open_methods().write;
        let length = c_int::try_from(buffer.len()).map_err(|_| sqlite::IOERR_WRITE)?;
        let offset = i64::try_from(position).map_err(|_| sqlite::IOERR_WRITE)?;
        // SAFETY: an open file and a buffer.
        check(unsafe { write(self.pointer(), buffer.as_ptr().cast(), length, offset) })
    }

    pub(crate) fn truncate(&mut self, size: i64) -> Answer {
        let truncate = self.open_methods().truncate;
        // SAFETY: an open file.
        check(unsafe { truncate(self.pointer(), size) })
    }

    pub(crate) fn sync(&mut self, flags: c_int) -> Answer {
        let sync = self.open_methods().sync;
        // SAFETY: an open file.
        check(unsafe { sync(self.pointer(), flags) })
    }

    pub(crate) fn size(&mut self) -> Answer<i64> {
        let file_size = self.open_methods().file_size;
        let mut size = 0;
        // SAFETY: an open file and a variable.
        check(unsafe { file_size(self.pointer(), &mut size) })?;
        Ok(size)
    }

    /// Returns `true` if the path names another file by now, or none.
    pub(crate) fn has_moved(&mut self) -> bool {
        let mut has_moved: c_int = 0;
        // SAFETY: this control takes a variable.
        let answer = unsafe { self.control(sqlite::FCNTL_HAS_MOVED, (&raw mut has_moved).cast()) };
        answer.is_ok() && has_moved != 0
    }

    /// # Safety
    /// `argument` is what SQLite's documentation says of `operation`.
    pub(crate) unsafe fn control(&mut self, operation: c_int, argument: *mut c_void) -> Answer {
        let file_control = self.open_methods().file_control;
        // SAFETY: an open file; the rest is the contract.
        check(unsafe { file_control(self.pointer(), operation, argument) })
    }

    pub(crate) fn sector_size(&mut self) -> c_int {
        let sector_size = self.open_methods().sector_size;
        // SAFETY: an open file.
        unsafe { sector_size(self.pointer()) }
    }

    pub(crate) fn device_characteristics(&mut self) -> c_int {
        let device_characteristics = self.open_methods().device_characteristics;
        // SAFETY: an open file.
        unsafe { device_characteristics(self.pointer()) }
    }
}

impl Drop for SystemFile {
    fn drop(&mut self) {
        if let Some(methods) = self.methods() {
            let close = methods.close;
            // SAFETY: an open file, for the last time. The system's VFS has nothing to report.
            unsafe { close(self.pointer()) };
            // SAFETY: the memory begins with this pointer.
            unsafe { self.pointer().write(File { methods: ptr::null() }) };
        }
    }
}

pub(crate) fn check(code: c_int) -> Answer {
    if code == sqlite::OK { Ok(()) } else { Err(code) }
}
