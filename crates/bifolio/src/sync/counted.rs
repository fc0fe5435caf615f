//! A mutex that notes who takes it: for tests of the library, which ask what a call has locked.
//!
//! Not in any other build. A thread notes the type behind each mutex that it takes, while it is
//! inside [`locked_by`]: that names the lock, because each has a type of its own, but for those
//! over `()`.

use parking_lot::MutexGuard;
use std::any::type_name;
use std::cell::RefCell;

thread_local! {
    static LOCKED: RefCell<Option<Vec<&'static str>>> = const { RefCell::new(None) };
}

/// Calls `call` and returns what mutexes protect that this thread took meanwhile, in order.
pub(crate) fn locked_by(call: impl FnOnce()) -> Vec<&'static str> {
    LOCKED.set(Some(Vec::new()));
    call();
    LOCKED.take().expect("calls of this are not nested")
}

/// Mutex that notes the type of what it protects each time a thread takes it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        note::<T>();
        self.0.lock()
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        note::<T>();
        self.0.try_lock()
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

fn note<T>() {
    let noted = |locked: &RefCell<Option<Vec<&'static str>>>| {
        locked.borrow_mut().iter_mut().for_each(|locked| locked.push(type_name::<T>()));
    };
    // A thread that ends has nothing to note.
    let _ = LOCKED.try_with(noted);
}
