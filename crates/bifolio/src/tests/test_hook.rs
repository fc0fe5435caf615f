//! Hooks that run code between two steps of the thread under test. A test registers an action for a
//! named place; in test builds, the code reports when it reaches the place.

use std::cell::RefCell;

type Action = Box<dyn FnOnce()>;

thread_local! {
    static NEXT: RefCell<Option<(&'static str, Action)>> = const { RefCell::new(None) };
}

/// Runs `action` once, when this thread reaches `place`.
pub(crate) fn set(place: &'static str, action: impl FnOnce() + 'static) {
    NEXT.set(Some((place, Box::new(action))));
}

/// Reports that this thread has reached `place`, and runs the action registered for it.
pub(crate) fn reach(place: &'static str) {
    let action = NEXT.with_borrow_mut(|next| next.take_if(|(awaited, _)| *awaited == place));
    if let Some((_, action)) = action {
        action();
    }
}

/// Returns `true` if this thread reached the place that was registered last.
pub(crate) fn has_run() -> bool {
    NEXT.take().is_none()
}
