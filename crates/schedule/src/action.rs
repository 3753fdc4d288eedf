//! Actions: the pieces of work of a rank in a step.
//!
//! The text of an action is that of PyTorch's pipelining: the stage, the letters of the action, and the micro-batch. `2F0`
//! is the forward pass of micro-batch 0 through stage 2.

use std::fmt;
use std::str::FromStr;

/// The kind of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The forward pass, without the loss.
    Forward,
    /// Both halves of the backward pass; in the last stage first the loss.
    Backward,
    /// The gradient of the stage's input, which the stage before waits for; in the last stage first the loss.
    BackwardInput,
    /// The gradients of the stage's parameters, which nobody waits for before the optimizer.
    BackwardWeight,
    /// The output of the stage begins to travel to the next stage.
    SendForward,
    /// The input of the stage may arrive from now on.
    ReceiveForward,
    /// The gradient of the stage's input begins to travel to the stage before.
    SendBackward,
    /// The gradient of the stage's output may arrive from now on.
    ReceiveBackward,
    /// The rank waits until the output of the stage has left. Only lists of PyTorch have it.
    WaitSendForward,
    /// The rank waits until the gradient of the stage's input has left. Only lists of PyTorch have it.
    WaitSendBackward,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Forward,
        Self::Backward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::SendForward,
        Self::ReceiveForward,
        Self::SendBackward,
        Self::ReceiveBackward,
        Self::WaitSendForward,
        Self::WaitSendBackward,
    ];

    /// The letters in the text of an action.
    pub const fn letters(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::BackwardInput => "I",
            Self::BackwardWeight => "W",
            Self::SendForward => "SEND_F",
            Self::ReceiveForward => "RECV_F",
            Self::SendBackward => "SEND_B",
            Self::ReceiveBackward => "RECV_B",
            Self::WaitSendForward => "WAIT_SEND_F",
            Self::WaitSendBackward => "WAIT_SEND_B",
        }
    }

    /// Whether it is arithmetic, and not communication.
    pub const fn computes(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::BackwardInput | Self::BackwardWeight)
    }
}

/// A piece of work of one stage on one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage, counted over all ranks in the order of the forward pass.
    pub stage: usize,
    /// Its kind.
    pub kind: Kind,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl Action {
    /// This kind of work.
    pub const fn new(stage: usize, kind: Kind, micro_batch: usize) -> Self {
        Self { stage, kind, micro_batch }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letters(), self.micro_batch)
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || format!("{text:?} is not an action like 2F0 or 1SEND_B3");
        let letters = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(problem)?;
        let (stage, rest) = text.split_at(letters);
        let digits = rest.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
        // The letters are ASCII, or not letters of any action.
        let (letters, micro_batch) = rest.split_at_checked(digits).ok_or_else(problem)?;
        let kind = Kind::ALL.into_iter().find(|kind| kind.letters() == letters);
        let number = |digits: &str| digits.parse().map_err(|_| problem());
        Ok(Self::new(number(stage)?, kind.ok_or_else(problem)?, number(micro_batch)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for kind in Kind::ALL {
            let action = Action::new(12, kind, 305);
            assert_eq!(action.to_string().parse(), Ok(action));
        }
        assert_eq!("2F0".parse(), Ok(Action::new(2, Kind::Forward, 0)));
        for text in
            ["", "2", "F0", "2F", "2X0", "2F-1", "F", "2é0", "99999999999999999999F0", "1SEND_0"]
        {
            assert!(text.parse::<Action>().unwrap_err().contains("is not an action"), "{text}");
        }
    }
}
