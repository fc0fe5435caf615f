//! The part of SQLite's interface that a VFS needs, as declared in `sqlite3.h` and `sqlite3ext.h`.
//!
//! Written by hand: the layout of these structs is frozen, and a binding generator is larger than
//! this crate.
//!
//! # Safety
//! Calls functions of SQLite by their index in the table that it passes to an extension.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

pub const OK: c_int = 0;
pub const ERROR: c_int = 1;
pub const BUSY: c_int = 5;
pub const NOMEM: c_int = 7;
pub const READONLY: c_int = 8;
pub const IOERR: c_int = 10;
pub const NOTFOUND: c_int = 12;
pub const FULL: c_int = 13;
pub const CANTOPEN: c_int = 14;
pub const MISUSE: c_int = 21;

pub const READONLY_CANTINIT: c_int = READONLY | 5 << 8;
pub const IOERR_READ: c_int = IOERR | 1 << 8;
pub const IOERR_SHORT_READ: c_int = IOERR | 2 << 8;
pub const IOERR_WRITE: c_int = IOERR | 3 << 8;
pub const IOERR_FSYNC: c_int = IOERR | 4 << 8;
pub const IOERR_TRUNCATE: c_int = IOERR | 6 << 8;
pub const IOERR_UNLOCK: c_int = IOERR | 8 << 8;
pub const IOERR_CHECKRESERVEDLOCK: c_int = IOERR | 14 << 8;
pub const IOERR_LOCK: c_int = IOERR | 15 << 8;
pub const IOERR_CLOSE: c_int = IOERR | 16 << 8;
pub const IOERR_SHMMAP: c_int = IOERR | 21 << 8;
pub const IOERR_SHMOPEN: c_int = IOERR | 18 << 8;
pub const IOERR_SHMSIZE: c_int = IOERR | 19 << 8;
pub const IOERR_SHMLOCK: c_int = IOERR | 20 << 8;

pub const OPEN_READONLY: c_int = 1;
pub const OPEN_READWRITE: c_int = 2;
pub const OPEN_CREATE: c_int = 4;
pub const OPEN_MAIN_DB: c_int = 0x100;
pub const OPEN_TRANSIENT_DB: c_int = 0x400;
pub const OPEN_TEMP_JOURNAL: c_int = 0x1000;
pub const OPEN_SUBJOURNAL: c_int = 0x2000;

pub const LOCK_NONE: c_int = 0;
pub const LOCK_SHARED: c_int = 1;
pub const LOCK_RESERVED: c_int = 2;
pub const LOCK_PENDING: c_int = 3;
pub const LOCK_EXCLUSIVE: c_int = 4;

pub const SHM_UNLOCK: c_int = 1;
pub const SHM_SHARED: c_int = 4;

pub const IOCAP_POWERSAFE_OVERWRITE: c_int = 0x1000;
pub const IOCAP_BATCH_ATOMIC: c_int = 0x4000;

pub const FCNTL_LOCKSTATE: c_int = 1;
pub const FCNTL_LAST_ERRNO: c_int = 4;
pub const FCNTL_SIZE_HINT: c_int = 5;
pub const FCNTL_CHUNK_SIZE: c_int = 6;
pub const FCNTL_FILE_POINTER: c_int = 7;
pub const FCNTL_PERSIST_WAL: c_int = 10;
pub const FCNTL_VFSNAME: c_int = 12;
pub const FCNTL_POWERSAFE_OVERWRITE: c_int = 13;
pub const FCNTL_PRAGMA: c_int = 14;
pub const FCNTL_TEMPFILENAME: c_int = 16;
pub const FCNTL_MMAP_SIZE: c_int = 18;
pub const FCNTL_HAS_MOVED: c_int = 20;
pub const FCNTL_SYNC: c_int = 21;
pub const FCNTL_COMMIT_PHASETWO: c_int = 22;
pub const FCNTL_EXTERNAL_READER: c_int = 40;

/// A file of SQLite: the table of its functions, followed by data of the VFS.
#[repr(C)]
pub struct File {
    pub methods: *const IoMethods,
}

/// The functions of a file, of version 2: with shared memory, without mapped pages.
#[repr(C)]
pub struct IoMethods {
    pub version: c_int,
    pub close: unsafe extern "C" fn(*mut File) -> c_int,
    pub read: unsafe extern "C" fn(*mut File, *mut c_void, c_int, i64) -> c_int,
    pub write: unsafe extern "C" fn(*mut File, *const c_void, c_int, i64) -> c_int,
    pub truncate: unsafe extern "C" fn(*mut File, i64) -> c_int,
    pub sync: unsafe extern "C" fn(*mut File, c_int) -> c_int,
    pub file_size: unsafe extern "C" fn(*mut File, *mut i64) -> c_int,
    pub lock: unsafe extern "C" fn(*mut File, c_int) -> c_int,
    pub unlock: unsafe extern "C" fn(*mut File, c_int) -> c_int,
    pub check_reserved_lock: unsafe extern "C" fn(*mut File, *mut c_int) -> c_int,
    pub file_control: unsafe extern "C" fn(*mut File, c_int, *mut c_void) -> c_int,
    pub sector_size: unsafe extern "C" fn(*mut File) -> c_int,
    pub device_characteristics: unsafe extern "C" fn(*mut File) -> c_int,
    pub shm_map: unsafe extern "C" fn(*mut File, c_int, c_int, c_int, *mut *mut c_void) -> c_int,
    pub shm_lock: unsafe extern "C" fn(*mut File, c_int, c_int, c_int) -> c_int,
    pub shm_barrier: unsafe extern "C" fn(*mut File),
    pub shm_unmap: unsafe extern "C" fn(*mut File, c_int) -> c_int,
}

/// A VFS, of version 2: with time in milliseconds, without replaceable system calls.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Vfs {
    pub version: c_int,
    pub file_size: c_int,
    pub path_max: c_int,
    pub next: *mut Vfs,
    pub name: *const c_char,
    pub data: *mut c_void,
    pub open: unsafe extern "C" fn(*mut Vfs, *const c_char, *mut File, c_int, *mut c_int) -> c_int,
    pub delete: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int) -> c_int,
    pub access: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int, *mut c_int) -> c_int,
    pub full_pathname: unsafe extern "C" fn(*mut Vfs, *const c_char, c_int, *mut c_char) -> c_int,
    pub dl_open: unsafe extern "C" fn(*mut Vfs, *const c_char) -> *mut c_void,
    pub dl_error: unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char),
    pub dl_sym: unsafe extern "C" fn(*mut Vfs, *mut c_void, *const c_char) -> *mut c_void,
    pub dl_close: unsafe extern "C" fn(*mut Vfs, *mut c_void),
    pub randomness: unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char) -> c_int,
    pub sleep: unsafe extern "C" fn(*mut Vfs, c_int) -> c_int,
    pub current_time: unsafe extern "C" fn(*mut Vfs, *mut f64) -> c_int,
    pub last_error: unsafe extern "C" fn(*mut Vfs, c_int, *mut c_char) -> c_int,
    pub current_time_ms: Option<unsafe extern "C" fn(*mut Vfs, *mut i64) -> c_int>,
    pub set_system_call: *const c_void,
    pub get_system_call: *const c_void,
    pub next_system_call: *const c_void,
}

/// The table of functions that SQLite passes to an extension.
#[derive(Clone, Copy)]
pub struct Api(*const *const c_void);

// SAFETY: a table that is never changed, of functions that any thread may call.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// Indices in the table; they are the same in all versions.
const FREE: usize = 58;
const LIBVERSION_NUMBER: usize = 67;
const MALLOC: usize = 68;
const VFS_FIND: usize = 141;
const VFS_REGISTER: usize = 142;
const LOG: usize = 167;
const FILE_CONTROL: usize = 127;
const AUTO_EXTENSION: usize = 192;

/// An entry point of an extension.
pub type EntryPoint =
    unsafe extern "C" fn(*mut c_void, *mut *mut c_char, *const *const c_void) -> c_int;

impl Api {
    /// # Safety
    /// The pointer that SQLite gave to the extension.
    pub unsafe fn new(table: *const *const c_void) -> Self {
        Self(table)
    }

    /// Returns the function at an index of the table.
    ///
    /// # Safety
    /// `F` is the type of that function.
    unsafe fn function<F: Copy>(self, place: usize) -> F {
        // SAFETY: the table has this place, in every version that `vfs` accepts.
        let entry = unsafe { self.0.add(place) };
        // SAFETY: a pointer to a function of the type `F`, by the contract.
        unsafe { entry.cast::<F>().read() }
    }

    /// Returns the version, such as 3_040_001.
    pub fn version(self) -> c_int {
        // SAFETY: `int sqlite3_libversion_number(void)`.
        let function =
            unsafe { self.function::<unsafe extern "C" fn() -> c_int>(LIBVERSION_NUMBER) };
        // SAFETY: has no demands.
        unsafe { function() }
    }

    /// Returns the VFS with a name; the default one for `None`.
    pub fn vfs_find(self, name: Option<&CStr>) -> *mut Vfs {
        type Function = unsafe extern "C" fn(*const c_char) -> *mut Vfs;
        // SAFETY: `sqlite3_vfs *sqlite3_vfs_find(const char *)`.
        let function = unsafe { self.function::<Function>(VFS_FIND) };
        // SAFETY: null, or a text.
        unsafe { function(name.map_or(std::ptr::null(), CStr::as_ptr)) }
    }

    /// Registers a VFS, without making it the default.
    ///
    /// # Safety
    /// `vfs` lives forever.
    pub unsafe fn vfs_register(self, vfs: *mut Vfs, is_default: bool) -> c_int {
        type Function = unsafe extern "C" fn(*mut Vfs, c_int) -> c_int;
        // SAFETY: `int sqlite3_vfs_register(sqlite3_vfs *, int)`.
        let function = unsafe { self.function::<Function>(VFS_REGISTER) };
        // SAFETY: it lives for ever.
        unsafe { function(vfs, c_int::from(is_default)) }
    }

    /// Has `entry` called with each connection that is opened from now on: an error of it, and
    /// its text, are those of the open.
    pub fn auto_extension(self, entry: EntryPoint) -> c_int {
        type Function = unsafe extern "C" fn(EntryPoint) -> c_int;
        // SAFETY: `int sqlite3_auto_extension(void (*)(void))`, which calls it as an entry point.
        let function = unsafe { self.function::<Function>(AUTO_EXTENSION) };
        // SAFETY: an entry point, which is never unloaded.
        unsafe { function(entry) }
    }

    /// Returns the file of the main database of a connection; null if it has none.
    ///
    /// # Safety
    /// `connection` is open.
    pub unsafe fn main_file(self, connection: *mut c_void) -> *mut File {
        type Function =
            unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut c_void) -> c_int;
        // SAFETY: `int sqlite3_file_control(sqlite3 *, const char *, int, void *)`.
        let function = unsafe { self.function::<Function>(FILE_CONTROL) };
        let mut file = std::ptr::null_mut::<File>();
        let argument = (&raw mut file).cast();
        // SAFETY: an open connection, and the variable that the operation takes.
        unsafe { function(connection, c"main".as_ptr(), FCNTL_FILE_POINTER, argument) };
        file
    }

    /// Writes a line to the log that the application may have set up.
    pub fn log(self, code: c_int, message: &str) {
        type Function = unsafe extern "C" fn(c_int, *const c_char, ...);
        let message = CString::new(message.replace('\0', "?")).unwrap_or_default();
        // SAFETY: `void sqlite3_log(int, const char *, ...)`.
        let function = unsafe { self.function::<Function>(LOG) };
        // SAFETY: the format takes one text.
        unsafe { function(code, c"bifolio: %s".as_ptr(), message.as_ptr()) }
    }

    /// # Safety
    /// Memory that SQLite allocated for its caller, which is not used any more.
    pub unsafe fn free(self, memory: *mut c_void) {
        // SAFETY: `void sqlite3_free(void *)`.
        let function = unsafe { self.function::<unsafe extern "C" fn(*mut c_void)>(FREE) };
        // SAFETY: the contract.
        unsafe { function(memory) }
    }

    /// Returns a copy of a text that SQLite frees; null if no memory is available.
    pub fn text(self, text: &str) -> *mut c_char {
        type Function = unsafe extern "C" fn(c_int) -> *mut c_void;
        let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
        let bytes = text.as_bytes_with_nul();
        let Ok(length) = c_int::try_from(bytes.len()) else { return std::ptr::null_mut() };
        // SAFETY: `void *sqlite3_malloc(int)`.
        let function = unsafe { self.function::<Function>(MALLOC) };
        // SAFETY: has no demands.
        let copy = unsafe { function(length) }.cast::<u8>();
        if !copy.is_null() {
            // SAFETY: `length` bytes are in both, which do not overlap.
            unsafe { bytes.as_ptr().copy_to_nonoverlapping(copy, bytes.len()) };
        }
        copy.cast()
    }
}
