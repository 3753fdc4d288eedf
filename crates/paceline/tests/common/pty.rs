//! Pseudo-terminals: what a user sees of a command, on a screen of any size.
//!
//! A [`Terminal`] runs a command on a pseudo-terminal, and an emulator makes a screen of its output.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::wait_until;

/// The rows of each screen; more are remembered.
const ROWS: u16 = 50;
const REMEMBERED_ROWS: usize = 10_000;

/// A command on a terminal.
pub struct Terminal {
    master: Arc<OwnedFd>,
    child: Child,
    reading: Option<JoinHandle<()>>,
    seen: Arc<Mutex<Seen>>,
}

struct Seen {
    screen: vt100::Parser,
    bytes: Vec<u8>,
}

impl Terminal {
    /// Runs `command` on a terminal with `columns` columns, where its standard output and error go.
    pub fn start(mut command: Command, columns: u16) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        tcsetwinsize(&master, size(columns)).unwrap();
        let no_control = OFlags::NOCTTY.bits() as i32;
        let slave =
            OpenOptions::new().read(true).write(true).custom_flags(no_control).open(name).unwrap();
        let terminal = || Stdio::from(slave.try_clone().unwrap());
        command.stdout(terminal()).stderr(terminal());
        command.env("TERM", "xterm-256color").env_remove("COLUMNS");
        let child = command.spawn().unwrap();
        // Reading ends when no process has the terminal open any more.
        drop((slave, command));
        let screen = empty_screen(columns);
        let seen = Arc::new(Mutex::new(Seen { screen, bytes: Vec::new() }));
        let master = Arc::new(master);
        let reading = std::thread::spawn({
            let mut terminal = File::from(master.try_clone().unwrap());
            let seen = seen.clone();
            move || {
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = terminal.read(&mut buffer) {
                    let mut seen = seen.lock().unwrap();
                    seen.screen.process(&buffer[..count]);
                    seen.bytes.extend_from_slice(&buffer[..count]);
                }
            }
        });
        Self { master, child, reading: Some(reading), seen }
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The lines on the screen and those that have left it upwards, as they are broken there.
    pub fn lines(&self) -> Vec<String> {
        lines(&mut self.seen.lock().unwrap().screen)
    }

    /// Everything that was written so far.
    pub fn bytes(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap().bytes).into_owned()
    }

    /// Waits until some line on the screen has all of `words`. Returns the line.
    #[track_caller]
    pub fn wait_for(&self, words: &[&str]) -> String {
        let mut found = None;
        wait_until(&format!("a line with {words:?}"), || {
            let has_all = |line: &String| words.iter().all(|word| line.contains(word));
            found = self.lines().into_iter().find(has_all);
            found.is_some()
        });
        found.unwrap()
    }

    /// Makes the terminal narrower or wider. As on most terminals, lines are broken again, and the cursor stays at its
    /// character.
    #[track_caller]
    pub fn resize(&self, columns: u16) {
        // A drawing may have arrived in part.
        wait_until("the cursor at the begin of a line", || {
            let mut seen = self.seen.lock().unwrap();
            let is_at_begin = seen.screen.screen().cursor_position().1 == 0;
            if is_at_begin {
                seen.screen = reflowed(&mut seen.screen, columns);
                tcsetwinsize(&*self.master, size(columns)).unwrap();
            }
            is_at_begin
        });
    }

    /// Waits for the end. Returns the exit code, the lines, and the column at which the cursor stands.
    #[track_caller]
    pub fn end(mut self) -> Ended {
        let mut code = None;
        wait_until("the end", || {
            let status = self.child.try_wait().unwrap();
            code = status.and_then(|status| status.code());
            status.is_some()
        });
        // A rank may end a moment after its launcher.
        let reading = self.reading.take().unwrap();
        wait_until("the end of the output", || reading.is_finished());
        reading.join().unwrap();
        let cursor_column = self.seen.lock().unwrap().screen.screen().cursor_position().1;
        Ended { code, lines: self.lines(), bytes: self.bytes(), cursor_column }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a command has left on its terminal.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    /// Without empty lines at the end.
    pub lines: Vec<String>,
    pub bytes: String,
    pub cursor_column: u16,
}

fn empty_screen(columns: u16) -> vt100::Parser {
    let [rows, columns] = [ROWS, columns].map(|count| NonZero::new(count).unwrap());
    vt100::Parser::new(rows, columns, REMEMBERED_ROWS)
}

fn size(columns: u16) -> Winsize {
    Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// All remembered lines of a screen, without empty ones at the end.
fn lines(parser: &mut vt100::Parser) -> Vec<String> {
    let screen = parser.screen_mut();
    let columns = screen.size().1.get();
    // The offset is limited to what there is.
    screen.set_scrollback(usize::MAX);
    let remembered = screen.scrollback();
    let mut lines = Vec::new();
    for offset in (1..=remembered).rev() {
        screen.set_scrollback(offset);
        lines.extend(screen.rows(0, columns).next());
    }
    screen.set_scrollback(0);
    lines.extend(screen.rows(0, columns));
    let mut lines: Vec<String> = lines.iter().map(|line| line.trim_end().to_owned()).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

/// The same text on a screen with another width. The cursor has to be at the begin of a line.
fn reflowed(parser: &mut vt100::Parser, columns: u16) -> vt100::Parser {
    let row = parser.screen().cursor_position().0;
    let at = parser.screen().rows(0, parser.screen().size().1.get()).nth(row.into()).unwrap();
    let mut above = lines(parser);
    if !at.trim_end().is_empty() {
        above.pop();
    }
    let mut new = empty_screen(columns);
    above.iter().for_each(|line| new.process(format!("{line}\r\n").as_bytes()));
    new.process(at.trim_end().as_bytes());
    // Back to the character at which the cursor was.
    let rows_of_line = at.trim_end().chars().count().max(1).div_ceil(columns.into());
    new.process(b"\r");
    if rows_of_line > 1 {
        new.process(format!("\x1b[{}A", rows_of_line - 1).as_bytes());
    }
    new
}
