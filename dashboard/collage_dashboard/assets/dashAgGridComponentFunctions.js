// Cells that are more than text: the run's name leads to its page without loading the application again.
var dagcomponentfuncs = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

dagcomponentfuncs.RunLink = function (props) {
  return React.createElement(
    window.dash_core_components.Link,
    { href: props.data.address, refresh: false },
    props.value
  );
};
