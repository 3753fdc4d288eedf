//! The rank's side: a connection to the list of members, and a thread that reads from it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_trace::runtime::{Condvar, poll};
use paceline_trace::{lock, thread_builder};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, shutdown};

use super::wire::{End, Inbox, Notice, Request, frame};
use super::{GenerationPlace, WHO, key};
use crate::RendezvousError;
use crate::address::SocketAddress;
use crate::deadline::Deadline;
use crate::peers::connect_to_peer;
use crate::socket::{poll_until, transmit};

/// How much longer than the limit a member waits for a sign of life of the list.
const GRACE: Duration = Duration::from_secs(5);

/// This process as a member of a run. Copies stand for the same member. When the last one is dropped, the others see that this
/// member has gone.
#[derive(Clone, Debug)]
pub struct RunMember(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    number: u64,
    shared: Arc<MemberLine>,
    /// Taken while a message is sent.
    sending: Mutex<()>,
}

#[derive(Debug)]
struct MemberLine {
    socket: OwnedFd,
    limit: Duration,
    is_asked: AtomicBool,
    is_broken: Arc<AtomicBool>,
    /// Consistent between any two statements, so a panic elsewhere does no harm.
    news: Mutex<News>,
    changed: Condvar,
}

/// The news that this member has not yet used.
#[derive(Debug, Default)]
struct News {
    /// How many messages have come.
    heard: u64,
    /// The place in the last generation, once it has come.
    place: Option<GenerationPlace>,
    /// The texts of exchanges of this generation that nobody has taken, by name.
    texts: Vec<(String, Vec<String>)>,
    /// Why nobody can exchange texts in this generation any more.
    broken: Option<String>,
    end: Option<RendezvousError>,
}

impl RunMember {
    /// Joins the run whose list of members is at a port of `host`. `number` is that of a rank which the launcher has started, and
    /// `None` for a process that comes by itself. `settings` must be those of the run. Waits for the list at most `limit`.
    /// Later calls that wait end if the list shows no sign of life for about as long.
    pub fn join(
        host: &str,
        port: u16,
        secret: &str,
        number: Option<u64>,
        settings: &str,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        let place = format!("{host}:{port}");
        let failed = |reason| RendezvousError::NotJoined { place: place.clone(), reason };
        let deadline = Deadline::after(limit);
        let address = SocketAddress::Tcp(host.into(), port);
        let socket = connect_to_peer(&address, WHO, &key(secret), &deadline).map_err(failed)?;
        let join = frame(&Request::Join { number, settings: settings.into() })?;
        let mut inbox = Inbox::default();
        let answer = transmit(&socket, &join, &deadline)
            .and_then(|()| first_notice(&socket, &mut inbox, &deadline))
            .map_err(|error| failed(format!("the list of members does not answer: {error}")))?;
        let number = match answer {
            Notice::Welcome(number) => number,
            Notice::Refused(reason) => return Err(failed(reason)),
            _ => return Err(failed("the list of members gives another answer".into())),
        };
        let shared = Arc::new(MemberLine {
            socket,
            limit,
            is_asked: AtomicBool::new(false),
            is_broken: Arc::default(),
            news: Mutex::new(News::default()),
            changed: Condvar::default(),
        });
        let reader = shared.clone();
        thread_builder("member")
            .spawn(move || reader.read(number, inbox))
            .map_err(|error| failed(format!("the system refuses a thread: {error}")))?;
        Ok(Self(Arc::new(Handle { number, shared, sending: Mutex::new(()) })))
    }

    /// The number that this member has for as long as it belongs to the run.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Says that this member is ready for the next generation, and waits for it. `missed` are the numbers of members that did not
    /// answer this one. A spare waits here until it is needed.
    ///
    /// # Errors
    ///
    /// [`RendezvousError::LeftOut`] if the others go on without this member; [`RendezvousError::Finished`] if they have done their
    /// work; [`RendezvousError::NoGeneration`] if nobody goes on, or the list has gone.
    pub fn regroup(&self, missed: &[u64]) -> Result<GenerationPlace, RendezvousError> {
        lock(&self.0.shared.news).place = None;
        self.0.send(&Request::Ready { missed: missed.into() })?;
        self.0.wait_for(|news| news.place.clone())
    }

    /// Gives all members of this generation and its spares the texts of all, by index. All call this with the same names, but for spares that wait
    /// for the next generation already, whose texts are empty.
    ///
    /// # Errors
    ///
    /// If a member of the generation has gone, does not answer, or waits for the next generation. The caller then calls
    /// [`RunMember::regroup`].
    pub fn exchange(&self, name: &str, text: String) -> Result<Vec<String>, String> {
        let place = lock(&self.0.shared.news).place.clone();
        let place = place.ok_or("this member belongs to no generation yet")?;
        let request = Request::Text { generation: place.generation, name: name.into(), text };
        self.0.send(&request).map_err(|error| error.to_string())?;
        let found = self.0.wait_for(|news| {
            let at = news.texts.iter().position(|(of, _)| of == name);
            let texts = at.map(|at| Ok(news.texts.swap_remove(at).1));
            texts.or_else(|| news.broken.clone().map(Err))
        });
        found.map_err(|error| error.to_string())?
    }

    /// Whether the others should meet again after this step: somebody waits who would make the group larger.
    pub fn is_asked(&self) -> bool {
        self.0.shared.is_asked.load(Ordering::Relaxed)
    }

    /// A flag that is set while nobody can meet in this generation any more: a member has gone, or waits for the next one.
    pub fn is_broken(&self) -> Arc<AtomicBool> {
        self.0.shared.is_broken.clone()
    }

    /// Whether this is so, now or within `limit`, and this member can wait for the next generation.
    pub fn breaks_within(&self, limit: Duration) -> bool {
        let MemberLine { news: mutex, changed, .. } = &*self.0.shared;
        let deadline = Deadline::after(limit);
        let mut news = lock(mutex);
        while news.broken.is_none() && news.end.is_none() && !deadline.has_passed() {
            news = deadline.sleep(|piece| changed.wait(mutex, news, Some(piece)));
        }
        news.broken.is_some() && news.end.is_none()
    }

    /// Says that this member's work is done, so that nobody takes its end for a death.
    pub fn leave(&self) {
        self.part(&Request::Leave);
    }

    /// Says that no member can go on, and why, in words.
    pub fn give_up(&self, reason: &str) {
        self.part(&Request::GiveUp { reason: reason.into() });
    }

    fn part(&self, request: &Request) {
        // If the list has gone, nobody waits for this.
        let _ = self.0.send(request);
    }
}

impl Handle {
    fn send(&self, request: &Request) -> Result<(), RendezvousError> {
        let bytes = frame(request)?;
        let _turn = lock(&self.sending);
        let sent = transmit(&self.shared.socket, &bytes, &Deadline::after(self.shared.limit));
        sent.map_err(|error| {
            // The list may have said why before it closed the connection.
            let end = self.wait_for(|_| None::<()>).err();
            end.unwrap_or_else(|| self.no_list(&error.to_string()))
        })
    }

    /// Waits until `found` finds something.
    fn wait_for<T>(&self, found: impl Fn(&mut News) -> Option<T>) -> Result<T, RendezvousError> {
        let MemberLine { limit, news: mutex, changed, .. } = &*self.shared;
        let limit = limit.saturating_add(GRACE);
        let deadline = Deadline::after(limit);
        let mut news = lock(mutex);
        let mut heard = news.heard;
        loop {
            if let Some(found) = found(&mut news) {
                return Ok(found);
            }
            if let Some(end) = &news.end {
                return Err(end.clone());
            }
            if news.heard != heard {
                heard = news.heard;
                deadline.extend_to(limit);
            }
            if deadline.has_passed() {
                return Err(self.no_list(&format!("no sign of life for {limit:?}")));
            }
            news = deadline.sleep(|piece| changed.wait(mutex, news, Some(piece)));
        }
    }

    fn no_list(&self, reason: &str) -> RendezvousError {
        gone(self.number, reason)
    }
}

fn gone(number: u64, reason: &str) -> RendezvousError {
    let reason = format!("the launcher of the first host, which has the list of members: {reason}");
    RendezvousError::NoGeneration { number, reason }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The reader holds the socket too, and ends with the connection.
        let _ = shutdown(&self.shared.socket, Shutdown::Both);
    }
}

impl MemberLine {
    /// Reads until the connection ends.
    fn read(&self, number: u64, mut inbox: Inbox) {
        let outcome = loop {
            match inbox.next() {
                Ok(Some(notice)) => self.take(number, notice),
                Ok(None) => {
                    let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                    let polled = poll(&mut fds, None);
                    let interrupted = polled == Err(rustix::io::Errno::INTR);
                    let came = polled.map_err(io::Error::from);
                    if let Err(error) = came.and_then(|_| inbox.fill(&self.socket))
                        && !interrupted
                    {
                        break error;
                    }
                }
                Err(error) => break error,
            }
        };
        let reason = match outcome.kind() {
            io::ErrorKind::UnexpectedEof => "it has ended".into(),
            _ => outcome.to_string(),
        };
        lock(&self.news).end.get_or_insert_with(|| gone(number, &reason));
        self.is_broken.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn take(&self, number: u64, notice: Notice) {
        let mut news = lock(&self.news);
        news.heard += 1;
        let is_now = |news: &News, of| news.place.as_ref().is_some_and(|it| it.generation == of);
        match notice {
            Notice::Next(place) => {
                self.is_asked.store(false, Ordering::Relaxed);
                let heard = news.heard;
                let end = news.end.take();
                *news = News { heard, place: Some(place), end, ..News::default() };
            }
            Notice::Texts { generation, name, texts } if is_now(&news, generation) => {
                news.texts.push((name, texts));
            }
            Notice::Broken { generation, reason } if is_now(&news, generation) => {
                news.broken = Some(reason);
            }
            Notice::Asked => self.is_asked.store(true, Ordering::Relaxed),
            Notice::End(end) => {
                news.end.get_or_insert(match end {
                    End::LeftOut(reason) => RendezvousError::LeftOut { number, reason },
                    End::Failed(reason) => RendezvousError::NoGeneration { number, reason },
                    End::Finished => RendezvousError::Finished { number },
                });
            }
            _ => {}
        }
        self.is_broken.store(news.broken.is_some() || news.end.is_some(), Ordering::Relaxed);
        drop(news);
        self.changed.notify_all();
    }
}

/// The first answer of the list.
fn first_notice(socket: &OwnedFd, inbox: &mut Inbox, deadline: &Deadline) -> io::Result<Notice> {
    loop {
        if let Some(notice) = inbox.next()? {
            return Ok(notice);
        }
        if deadline.has_passed() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        match poll_until(&mut fds, Some(deadline)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => inbox.fill(socket)?,
            Err(error) => return Err(error.into()),
        }
    }
}
