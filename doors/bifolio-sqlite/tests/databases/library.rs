//! SQLite's library in this process, and connections through the VFS.
//!
//! # Safety
//! The types of the functions are those of `sqlite3.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Once;

use bifolio_testing::skip;

const OPEN_READWRITE_CREATE_URI: c_int = 2 | 4 | 0x40;

/// SQLite's library, loaded when the test runs.
#[derive(Clone, Copy)]
pub(crate) struct Library(*mut c_void);

// SAFETY: a handle that any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads the library and registers the VFS in it; `None` if the machine has none.
    pub(crate) fn load() -> Option<Self> {
        static REGISTERED: Once = Once::new();
        // SAFETY: SQLite may be loaded.
        let library = Self(unsafe { libc::dlopen(c"libsqlite3.so.0".as_ptr(), libc::RTLD_NOW) });
        if library.0.is_null() {
            skip("sqlite3", "the library libsqlite3.so.0 is not installed");
            return None;
        }
        REGISTERED.call_once(|| {
            type Register = unsafe extern "C" fn(Entry) -> c_int;
            // SAFETY: the function's type.
            let register: Register = unsafe { library.function(c"sqlite3_auto_extension") };
            // SAFETY: an entry point.
            assert_eq!(unsafe { register(bifolio_sqlite::sqlite3_bifoliosqlite_init) }, 0);
            // The extension is registered by the first connection.
            drop(library.open(":memory:").unwrap());
        });
        Some(library)
    }

    /// Loads the library, and has it count no memory: it takes no lock of the process then when it
    /// allocates. `None` if the machine has none.
    pub(crate) fn load_without_statistics() -> Option<Self> {
        const CONFIG_MEMSTATUS: c_int = 9;
        // SAFETY: SQLite may be loaded.
        let library = Self(unsafe { libc::dlopen(c"libsqlite3.so.0".as_ptr(), libc::RTLD_NOW) });
        if !library.0.is_null() {
            // SAFETY: the function's type.
            let configure: unsafe extern "C" fn(c_int, ...) -> c_int =
                unsafe { library.function(c"sqlite3_config") };
            // SAFETY: an option, and its argument.
            assert_eq!(unsafe { configure(CONFIG_MEMSTATUS, 0 as c_int) }, 0);
        }
        Self::load()
    }

    /// Loads another copy of the library, which has globals of its own and no VFS of this crate, as
    /// a program has that contains two. A copy stays loaded.
    pub(crate) fn load_copy() -> Option<Self> {
        let first = Self::load()?;
        let mut found = libc::Dl_info {
            dli_fname: ptr::null(),
            dli_fbase: ptr::null_mut(),
            dli_sname: ptr::null(),
            dli_saddr: ptr::null_mut(),
        };
        // SAFETY: the address of a function of the library.
        let address: *const c_void = unsafe { first.function(c"sqlite3_libversion_number") };
        // SAFETY: an address, and memory for the answer.
        assert_ne!(unsafe { libc::dladdr(address, &mut found) }, 0);
        // SAFETY: the path of a library that stays loaded.
        let path = unsafe { CStr::from_ptr(found.dli_fname) }.to_str().unwrap();
        // The loader takes another file, with another name, for another library.
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("another_sqlite.so");
        std::fs::copy(path, &copy).unwrap();
        let name = CString::new(copy.to_str().unwrap()).unwrap();
        // SAFETY: SQLite may be loaded.
        let library = Self(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) });
        assert!(!library.0.is_null());
        // SAFETY: as above.
        let other: *const c_void = unsafe { library.function(c"sqlite3_libversion_number") };
        assert_ne!(address, other);
        Some(library)
    }

    /// Opens a database by its name or URI, or returns the message of SQLite.
    pub(crate) fn open(self, name: &str) -> Result<Connection, String> {
        type Open =
            unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, *const c_char) -> c_int;
        let name = CString::new(name).unwrap();
        let mut connection = Connection { library: self, pointer: ptr::null_mut() };
        // SAFETY: the function's type.
        let open: Open = unsafe { self.function(c"sqlite3_open_v2") };
        let (pointer, flags) = (&mut connection.pointer, OPEN_READWRITE_CREATE_URI);
        // SAFETY: texts and a variable.
        let code = unsafe { open(name.as_ptr(), pointer, flags, ptr::null()) };
        if code == 0 { Ok(connection) } else { Err(connection.message()) }
    }

    /// Opens a database through the system's VFS.
    pub(crate) fn open_plainly(self, path: &Path) -> Connection {
        self.open(&format!("file:{}?vfs=unix", path.display())).unwrap()
    }

    /// Opens a database through the VFS, with parameters.
    pub(crate) fn open_cached(self, path: &Path, parameters: &str) -> Result<Connection, String> {
        let connection = self.open(&format!("file:{}?vfs=bifolio&{parameters}", path.display()))?;
        connection.run("pragma busy_timeout=20000")?;
        Ok(connection)
    }

    /// # Safety
    /// `F` is the function's type.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> F {
        // SAFETY: a loaded library.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        // SAFETY: the contract.
        unsafe { ptr::from_ref(&address).cast::<F>().read() }
    }
}

type Entry = unsafe extern "C" fn(*mut c_void, *mut *mut c_char, *const *const c_void) -> c_int;

/// A connection; one thread at a time uses it.
pub(crate) struct Connection {
    library: Library,
    pointer: *mut c_void,
}

// SAFETY: SQLite lets any thread use it, one at a time.
unsafe impl Send for Connection {}

/// Appends the values of a row, as one line with bars between them.
unsafe extern "C" fn add_row(
    lines: *mut c_void,
    count: c_int,
    values: *mut *mut c_char,
    _names: *mut *mut c_char,
) -> c_int {
    let text = |column| {
        // SAFETY: SQLite has as many values as columns.
        let value = unsafe { values.wrapping_add(column).read() };
        // SAFETY: null, or a text.
        if value.is_null() { "".into() } else { unsafe { CStr::from_ptr(value) }.to_string_lossy() }
    };
    let row: Vec<_> = (0..count as usize).map(text).collect();
    // SAFETY: the argument that `run` gave.
    unsafe { (*lines.cast::<Vec<String>>()).push(row.join("|")) };
    0
}

impl Connection {
    /// Runs statements. Returns their rows, or the message of SQLite.
    pub(crate) fn run(&self, sql: &str) -> Result<Vec<String>, String> {
        type Row =
            unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;
        type Run = unsafe extern "C" fn(
            *mut c_void,
            *const c_char,
            Row,
            *mut c_void,
            *const c_void,
        ) -> c_int;
        let text = CString::new(sql).unwrap();
        // SAFETY: the function's type.
        let run: Run = unsafe { self.library.function(c"sqlite3_exec") };
        let mut lines: Vec<String> = Vec::new();
        let argument = ptr::from_mut(&mut lines).cast();
        // SAFETY: an open connection, a text, and the argument of the function for rows.
        let code = unsafe { run(self.pointer, text.as_ptr(), add_row, argument, ptr::null()) };
        if code == 0 { Ok(lines) } else { Err(self.message()) }
    }

    /// Runs statements that succeed, and returns the first value.
    #[track_caller]
    pub(crate) fn ask(&self, sql: &str) -> String {
        let rows = self.run(sql).unwrap_or_else(|problem| panic!("{sql}: {problem}"));
        rows.into_iter().next().unwrap_or_default()
    }

    fn message(&self) -> String {
        type Message = unsafe extern "C" fn(*mut c_void) -> *const c_char;
        // SAFETY: the function's type.
        let message: Message = unsafe { self.library.function(c"sqlite3_errmsg") };
        // SAFETY: a connection, or what an open left.
        let text = unsafe { message(self.pointer) };
        // SAFETY: a text, up to the next call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub(crate) fn control<T>(&self, operation: c_int, argument: &mut T) -> c_int {
        type Control =
            unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut c_void) -> c_int;
        // SAFETY: the function's type.
        let control: Control = unsafe { self.library.function(c"sqlite3_file_control") };
        let argument = ptr::from_mut(argument).cast();
        // SAFETY: an open connection, and an argument as the operation has it.
        unsafe { control(self.pointer, c"main".as_ptr(), operation, argument) }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the function's type.
        let close: unsafe extern "C" fn(*mut c_void) -> c_int =
            unsafe { self.library.function(c"sqlite3_close") };
        // SAFETY: an open connection, without statements.
        assert_eq!(unsafe { close(self.pointer) }, 0);
    }
}
