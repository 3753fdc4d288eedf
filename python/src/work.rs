//! Work in the background, as Python sees it.
//!
//! Input: the end of an operation, from a thread of ours. Output: its outcome, for threads of Python that wait and for callbacks.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use paceline_collectives::CollectiveError;
use paceline_trace::lock;
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;

use crate::interpreter::enter;

/// Why an operation has failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    text: String,
    is_timeout: bool,
}

/// The outcome of an operation: for a receive, the rank of the sender.
pub(crate) type Outcome = Result<Option<usize>, Failure>;

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        let is_timeout = matches!(error, CollectiveError::TimedOut { .. });
        Self { text: error.to_string(), is_timeout }
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self { text: error.to_string(), is_timeout: false }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        if failure.is_timeout {
            PyTimeoutError::new_err(failure.text)
        } else {
            PyRuntimeError::new_err(failure.text)
        }
    }
}

/// The state of an operation that runs in the background.
#[derive(Default)]
pub(crate) struct Progress {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    callbacks: Vec<Py<PyAny>>,
}

/// The Python objects that an operation needs until it ends.
pub(crate) struct Held {
    /// Owns the memory.
    pub(crate) keep: Py<PyAny>,
    /// Called without arguments after the operation has succeeded, before the work ends.
    pub(crate) finish: Option<Py<PyAny>>,
}

impl Progress {
    /// Ends the work on a thread of ours.
    pub(crate) fn settle(&self, held: Held, mut outcome: Outcome) {
        let Held { keep, finish } = held;
        if let (Ok(_), Some(finish)) = (&outcome, finish) {
            let finished = enter(|py| finish.call0(py).map(drop));
            let has_left = || PyRuntimeError::new_err("the interpreter ends").into();
            outcome = match finished {
                Some(Ok(())) => outcome,
                Some(Err(error)) => Err(error.into()),
                None => Err(has_left()),
            };
        }
        // Before anybody wakes: the memory goes back when the next thread of Python passes by.
        drop(keep);
        let callbacks = {
            let mut state = lock(&self.state);
            state.outcome = Some(outcome.clone());
            self.ended.notify_all();
            std::mem::take(&mut state.callbacks)
        };
        if !callbacks.is_empty() {
            enter(|py| callbacks.into_iter().for_each(|callback| call(py, &callback, &outcome)));
        }
    }
}

fn call(py: Python<'_>, callback: &Py<PyAny>, outcome: &Outcome) {
    let error = outcome.clone().err().map(|failure| PyErr::from(failure).into_value(py));
    if let Err(error) = callback.call1(py, (error,)) {
        error.write_unraisable(py, None);
    }
}

/// An operation in the background.
#[pyclass(frozen, name = "Work")]
pub(crate) struct PyWork {
    pub(crate) progress: Arc<Progress>,
}

#[pymethods]
impl PyWork {
    /// Waits until the operation has ended, for at most `timeout_s` seconds if that is given. Raises its error.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        let limit = timeout_s.map(Duration::try_from_secs_f64).and_then(Result::ok);
        let outcome = py.detach(|| {
            let Progress { state, ended } = &*self.progress;
            let is_running = |state: &mut State| state.outcome.is_none();
            // Longer than any program runs.
            let limit = limit.unwrap_or(Duration::from_secs(u32::MAX.into()));
            let waited = ended.wait_timeout_while(lock(state), limit, is_running);
            waited.unwrap_or_else(PoisonError::into_inner).0.outcome.clone()
        });
        let late = || PyTimeoutError::new_err("the operation has not ended within the given time");
        Ok(outcome.ok_or_else(late)?.map(drop)?)
    }

    /// The rank of the sender of a message that has been received.
    fn source(&self) -> Option<usize> {
        lock(&self.progress.state).outcome.clone()?.ok()?
    }

    /// Calls `callback` with the error, or with None, when the operation has ended: now, or on the thread that ends it.
    fn then(&self, py: Python<'_>, callback: Py<PyAny>) {
        let outcome = {
            let mut state = lock(&self.progress.state);
            let Some(outcome) = state.outcome.clone() else {
                state.callbacks.push(callback);
                return;
            };
            outcome
        };
        call(py, &callback, &outcome);
    }
}
